"""What every archive is held to, whatever its format."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from serving.errors import ArchiveError

MAX_FILES = 10_000  # folders count, too
MAX_DEPTH = 32
CHUNK_BYTES = 256 << 10
# What the engine keeps beside a model and trusts: nobody else may bring it.
OWN_FOLDER = ".prepared"


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Output:
    """The folder that an archive is unpacked to: all that is put there is checked before.

    Refused, with `ArchiveError`: absolute paths, `..`, names not in UTF-8, what lies deeper than
    `MAX_DEPTH`, links to anything but a file of the archive before them, a name twice, more than
    `MAX_FILES` members or `max_bytes` bytes. What the engine alone may write is left out.
    `reserve` is called with a file's size in bytes before it is written and may raise.
    """

    def __init__(self, folder: Path, max_bytes: int, reserve: Callable[[int], None]) -> None:
        self._root, self._max_bytes, self._reserve = folder, max_bytes, reserve
        self._files: dict[str, Path] = {}
        self._folders = {"."}
        self._members = self._bytes = 0

    def check(self, members: int, size: int) -> None:
        """Whether so much may be in an archive."""
        if members > MAX_FILES or not 0 <= size <= self._max_bytes:
            raise ArchiveError(
                f"it has more than {MAX_FILES} files or {self._max_bytes >> 20} MiB (MODEL_MAX_MIB)"
            )

    def finish(self) -> None:
        if not self._files:
            raise ArchiveError("there are no files in it")

    def add_folder(self, name: str) -> None:
        path = inside(name, name)
        if _is_left_out(path) or path in self._folders:
            self._count(0)
        else:
            self._make_folder(path)

    def add_file(self, name: str, source: Source, size: int, executable: bool) -> None:
        """Writes `size` bytes of `source`."""
        self._count(size)
        path = inside(name, name)
        if _is_left_out(path):
            return
        target = self._target(path, name)
        self._reserve(size)
        with target.open("xb") as file:
            while size and (data := source.read(min(size, CHUNK_BYTES))):
                file.write(data)
                size -= len(data)
        if size:
            raise ArchiveError(f"it ends in the middle of {name!r}")
        if executable:
            target.chmod(0o755)

    def add_link(self, name: str, linked: str) -> None:
        """Links are made as hard links, and only to what is known to be a file: however links are
        combined, none leads out."""
        self._count(0)
        path, linked = inside(name, name), inside(linked, name)
        if _is_left_out(path):
            return
        if linked not in self._files:
            raise ArchiveError(f"{name!r} links to what is no file before it")
        os.link(self._files[linked], self._target(path, name))

    def _count(self, size: int) -> None:
        self._members += 1
        self.check(self._members, self._bytes + size if size >= 0 else size)
        self._bytes += size

    def _target(self, path: str, name: str) -> Path:
        if path in self._files or path in self._folders:
            raise ArchiveError(f"{name!r} is in it twice")
        self._make_folder(posixpath.dirname(path) or ".")
        self._files[path] = self._root / path
        return self._files[path]

    def _make_folder(self, path: str) -> None:
        missing = []
        while path not in self._folders:
            missing.append(path)
            path = posixpath.dirname(path) or "."
        for path in reversed(missing):
            if path in self._files:
                raise ArchiveError(f"{path!r} is both a file and a folder")
            self._count(0)
            (self._root / path).mkdir()
            self._folders.add(path)


def inside(path: str, member: str) -> str:
    """`path` without `.` and inner `..`. Raises `ArchiveError` if it leads out of the folder."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ArchiveError(f"a name in it is not UTF-8: {path!a}") from None
    normal = posixpath.normpath(path)
    leads_out = path.startswith("/") or normal == ".." or normal.startswith("../")
    if leads_out or "\0" in path or (path == member and ".." in path.split("/")):
        raise ArchiveError(f"{member!r} leads out of its folder")
    if normal.count("/") >= MAX_DEPTH:
        raise ArchiveError(f"{member!r} lies deeper than {MAX_DEPTH} folders")
    return normal


def _is_left_out(path: str) -> bool:
    return OWN_FOLDER in path.split("/")
