"""Unpacks a model's `.tar.gz` or `.mar`: nothing outside its folder, all of it or nothing."""

from __future__ import annotations

import gzip
import os
import posixpath
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, cast

from serving.errors import ArchiveError
from serving.store.disk import full_disk_is_an_error_of_ours
from serving.store.rules import CHUNK_BYTES, MAX_BYTES, MAX_FILES, inside
from serving.store.zipped import MAGIC, extract_zip

# tarfile reads a header (long names, extended attributes) at once, whatever size it claims.
MAX_READ_BYTES = 1 << 20
MAX_PADDING_BYTES = 16 << 20


class Readable(Protocol):
    """A file, or one that is being downloaded; reading waits for what is not there yet."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...


def unpack(archive: Path, folder: Path) -> None:
    """Replaces `folder` by the content of `archive`, or raises what `extract` does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with archive.open("rb") as stream:
            extract(stream, fresh, archive.name)
        fresh.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def extract(
    stream: Readable, folder: Path, name: str, reserve: Callable[[int], None] = lambda size: None
) -> None:
    """Unpacks a tar.gz or a zip into `folder`, which is empty and there.

    A tar.gz is read once, forwards; a zip has its list of members at the end. Each member is
    checked before it is written. Refused, with `ArchiveError`: absolute paths, `..`, links to
    anything but a file of the archive before them, devices and pipes, a name twice or not in UTF-8,
    more than `MAX_FILES` members or `MAX_BYTES` bytes, and damaged archives.
    `reserve` is called with a member's size in bytes before it is written and may raise. Raises
    `DiskFull`, too. What was written by then stays for the caller to remove.
    """
    try:
        with full_disk_is_an_error_of_ours(name):
            start = stream.read(len(MAGIC))
            stream.seek(0)
            if start == MAGIC:
                extract_zip(cast(IO[bytes], stream), folder, reserve)
            else:
                _extract_tar(stream, folder, reserve)
    except ArchiveError as error:
        raise ArchiveError(f"{name} cannot be unpacked: {error.message}") from error
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        NotImplementedError,  # zipfile's, for parts of the format that it does not know
        EOFError,
        zlib.error,
        OSError,
        ValueError,
    ) as error:
        raise ArchiveError(f"{name} cannot be unpacked, it is damaged: {error}") from error


def _extract_tar(stream: Readable, folder: Path, reserve: Callable[[int], None]) -> None:
    with gzip.GzipFile("", "rb", fileobj=cast(IO[bytes], stream)) as plain:
        forward = _Forward(plain)
        # No `with`: nothing is left open, and a stream that broke off is not to be read again.
        tar = tarfile.open(fileobj=cast(IO[bytes], forward), mode="r:")  # noqa: SIM115
        _Extraction(tar, folder, reserve).run()
        forward.finish()


class _Forward:
    """The bytes inside the gzip, as tarfile reads them."""

    def __init__(self, plain: gzip.GzipFile) -> None:
        self._plain = plain
        self.tell, self.seek = plain.tell, plain.seek

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise ArchiveError(f"it has a header of {size} bytes")
        return self._plain.read(size)

    def finish(self) -> None:
        """Reads to the end, where gzip's check sum is."""
        padding = 0
        while data := self._plain.read(CHUNK_BYTES):
            padding += len(data)
            if data.strip(b"\0") or padding > MAX_PADDING_BYTES:
                raise ArchiveError("more data follows where it should end")


class _Extraction:
    """The members of one archive, in their order."""

    def __init__(self, tar: tarfile.TarFile, folder: Path, reserve: Callable[[int], None]) -> None:
        self._tar, self._folder, self._reserve = tar, folder, reserve
        self._files: dict[str, Path] = {}
        self._members = self._bytes = 0

    def run(self) -> None:
        while (member := self._tar.next()) is not None:
            self._count(member)
            self._write(member)
        if not self._files:
            raise ArchiveError("there are no files in it")

    def _count(self, member: tarfile.TarInfo) -> None:
        self._members += 1
        self._bytes += member.size
        if self._members > MAX_FILES or self._bytes > MAX_BYTES or member.size < 0:
            raise ArchiveError(f"it has more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB")

    def _write(self, member: tarfile.TarInfo) -> None:
        path = inside(member.name, member.name)
        target = self._folder / path
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            return
        if path in self._files or path == ".":
            raise ArchiveError(f"{member.name!r} is in it twice")
        target.parent.mkdir(parents=True, exist_ok=True)
        if member.isreg():
            self._reserve(member.size)
            source = cast(IO[bytes], self._tar.extractfile(member))
            with target.open("xb") as file:
                shutil.copyfileobj(source, file, CHUNK_BYTES)
                if file.tell() != member.size:
                    raise ArchiveError(f"it ends in the middle of {member.name!r}")
            if member.mode & 0o100:
                target.chmod(0o755)
            self._files[path] = target
        elif member.issym() or member.islnk():
            # Links are made as hard links, and only to what is known to be a file: however links
            # are combined, none leads out.
            base = posixpath.dirname(path) if member.issym() else ""
            linked = inside(posixpath.join(base, member.linkname), member.name)
            if linked not in self._files:
                raise ArchiveError(f"{member.name!r} links to what is no file before it")
            os.link(self._files[linked], target)
            self._files[path] = target
        else:
            raise ArchiveError(f"{member.name!r} is no file, folder or link")
