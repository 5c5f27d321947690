"""Unpacks a model's `.tar.gz` or `.mar` into one folder, within limits of size and depth."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from serving.errors import ArchiveError
from serving.store.archive_limits import Output
from serving.store.archive_tar import extract_tar
from serving.store.archive_zip import MAGIC, extract_zip
from serving.store.disk import raise_disk_full


def extract(
    stream: IO[bytes],
    folder: Path,
    name: str,
    max_bytes: int,
    reserve: Callable[[int], None] = lambda size: None,
) -> None:
    """Unpack a tar.gz or a zip of at most `max_bytes` into the empty `folder`.

    A tar.gz is read once from start to end; a zip is read from its end first. Raises `ArchiveError`
    for members that `Output` rejects, sparse files, devices, pipes, and damaged archives;
    `DiskFull`; and what `reserve` raises. After an error the caller removes the files written.
    """
    try:
        with raise_disk_full(name):
            start = stream.read(len(MAGIC))
            stream.seek(0)
            output = Output(folder, max_bytes, reserve)
            if start == MAGIC:
                extract_zip(stream, output)
            else:
                extract_tar(stream, output)
    except ArchiveError as error:
        raise ArchiveError(f"{name} cannot be unpacked: {error.message}") from error
    except OSError as error:  # `strerror`: the whole text would contain the path
        reason = error.strerror or error
        raise ArchiveError(f"{name} cannot be unpacked, it is damaged: {reason}") from error
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        NotImplementedError,  # raised by zipfile for unsupported parts of the format
        EOFError,
        zlib.error,
        ValueError,
    ) as error:
        raise ArchiveError(f"{name} cannot be unpacked, it is damaged: {error}") from error
