"""Unpacks a model's `.tar.gz` or `.mar`: nothing outside its folder, and no more than a bound."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, cast

from serving.errors import ArchiveError
from serving.store.archive_limits import Output
from serving.store.archive_tar import extract_tar
from serving.store.archive_zip import MAGIC, extract_zip
from serving.store.disk import full_disk_is_an_error_of_ours


class Readable(Protocol):
    """A file, or one that is being downloaded; reading waits for what is not there yet."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...


def extract(
    stream: Readable,
    folder: Path,
    name: str,
    max_bytes: int,
    reserve: Callable[[int], None] = lambda size: None,
) -> None:
    """Unpacks a tar.gz or a zip into `folder`, which is empty and there.

    A tar.gz is read once, forwards; a zip has its list of members at the end. Raises
    `ArchiveError` for what `Output` refuses, sparse files, devices and pipes, and damaged archives;
    `DiskFull`; and what `reserve` raises. What was written by then stays for the caller to remove.
    """
    try:
        with full_disk_is_an_error_of_ours(name):
            start = stream.read(len(MAGIC))
            stream.seek(0)
            output = Output(folder, max_bytes, reserve)
            if start == MAGIC:
                extract_zip(cast(IO[bytes], stream), output)
            else:
                extract_tar(cast(IO[bytes], stream), output)
    except ArchiveError as error:
        raise ArchiveError(f"{name} cannot be unpacked: {error.message}") from error
    except OSError as error:  # its text has the path in it, where there is a number
        reason = error.strerror or error
        raise ArchiveError(f"{name} cannot be unpacked, it is damaged: {reason}") from error
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        NotImplementedError,  # zipfile's, for parts of the format that it does not know
        EOFError,
        zlib.error,
        ValueError,
    ) as error:
        raise ArchiveError(f"{name} cannot be unpacked, it is damaged: {error}") from error
