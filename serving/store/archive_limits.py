"""Limits and path checks for archives of every format."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import IO

from common.model_files import is_hidden
from serving.errors import ArchiveError

MAX_FILES = 10_000  # files, links and folders
MAX_DEPTH = 32  # folders
CHUNK_BYTES = 256 << 10


class Output:
    """The folder that an archive is unpacked to; checks each member before it is written.

    Raises `ArchiveError` for absolute paths, `..`, files without a name, names not in UTF-8, paths
    deeper than `MAX_DEPTH`, links to anything but an earlier file of the archive, duplicate names,
    more than `MAX_FILES` members or `max_bytes` bytes. Hidden files are skipped; `.prepared`, which
    the engine trusts, is one.
    `reserve` is called with a file's size in bytes before it is written and may raise.
    """

    def __init__(self, folder: Path, max_bytes: int, reserve: Callable[[int], None]) -> None:
        self._root, self._max_bytes, self._reserve = folder, max_bytes, reserve
        self._files: dict[str, Path] = {}
        self._folders = {"."}
        self._members = self._bytes = 0

    def check(self, members: int, size: int) -> None:
        """Raise `ArchiveError` for too many members or bytes."""
        if members > MAX_FILES or not 0 <= size <= self._max_bytes:
            raise ArchiveError(
                f"it has more than {MAX_FILES} files or {self._max_bytes >> 20} MiB (MODEL_MAX_MIB)"
            )

    def finish(self) -> None:
        """Raise `ArchiveError` for an archive without files."""
        if not self._files:
            raise ArchiveError("there are no files in it")

    def add_folder(self, name: str) -> None:
        path = inside(name, name)
        if is_hidden(path) or path in self._folders:
            self._count(0)
        else:
            self._make_folder(path)

    def add_file(
        self, name: str, source: IO[bytes] | BufferedIOBase, size: int, executable: bool
    ) -> None:
        """Write the next `size` bytes of `source` to a new file."""
        self._count(size)
        path = file_inside(name)
        if is_hidden(path):
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
        """Make a hard link to an earlier file of the archive; other targets could be outside."""
        self._count(0)
        path, linked = file_inside(name), inside(linked, name)
        if is_hidden(path):
            return
        if linked not in self._files:
            raise ArchiveError(f"{name!r} is a link, but not to an earlier file of the archive")
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


def file_inside(name: str) -> str:
    """Normalize the path of a file. Raises `ArchiveError` if it is that of the folder itself."""
    path = inside(name, name)
    if path == ".":
        raise ArchiveError(f"{name!r} is no name of a file")
    return path


def inside(path: str, member: str) -> str:
    """Normalize a path in an archive, in which Windows' packers may separate by backslashes.

    Raises `ArchiveError` if it leads out of the folder.
    """
    path, member = path.replace("\\", "/"), member.replace("\\", "/")
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
