"""A folder of files named by the hash of their content: what is equal is stored once."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

CHUNK_BYTES = 1 << 20
OWN_FILE_BYTES = 1 << 20  # what is smaller shares a file with others
ZEROS = bytes(CHUNK_BYTES)


class Store:
    """Adds files to `folder`; they are written in `building`, on the same disk, and renamed.

    Thread-safe.
    """

    def __init__(self, folder: Path, building: Path) -> None:
        self._folder, self.building = folder, building
        self.names: set[str] = set()

    def check_room(self, needed: float) -> None:
        """Raises `OSError` where the disk has no room for so many bytes."""
        if shutil.disk_usage(self.building).free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed in {self.building}")

    def add(self, chunks: Iterable[bytes | memoryview], suffix: str) -> str:
        """Writes a file and returns its name; a whole one that is there already is kept.

        Nothing waits for the disk: after a crash a file may be cut short, which its name tells.
        """
        digest = blake3()
        with tempfile.NamedTemporaryFile(dir=self.building, delete=False) as file:
            for chunk in chunks:
                digest.update(chunk)
                if chunk == ZEROS[: len(chunk)]:
                    file.seek(len(chunk), os.SEEK_CUR)  # takes no room on the disk
                else:
                    file.write(chunk)
            file.truncate()
        return self._keep(Path(file.name), digest.hexdigest() + suffix)

    def copy(self, source: Path) -> None:
        """Adds a file of another such folder that is known to be whole. What takes no room there
        takes none here, and no time."""
        with (
            source.open("rb", buffering=0) as given,
            tempfile.NamedTemporaryFile(dir=self.building, delete=False) as file,
        ):
            for begin, end in _written(given.fileno()):
                given.seek(begin)
                file.seek(begin)
                while begin < end:
                    chunk = given.read(min(CHUNK_BYTES, end - begin))
                    if not chunk:
                        raise OSError(f"{source} was cut short")
                    begin += file.write(chunk)
            file.truncate(source.stat().st_size)
        self._keep(Path(file.name), source.name)

    def _keep(self, temporary: Path, name: str) -> str:
        temporary.chmod(0o644)
        path = self._folder / name
        if path.exists() and is_whole(path):
            temporary.unlink()
        else:
            temporary.replace(path)
        self.names.add(name)
        return name


def _written(file: int) -> Iterator[tuple[int, int]]:
    """The parts of a file, from and to, that are not holes."""
    end = 0
    while True:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # there is no more
                raise
            return
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin, end


def is_whole(path: Path) -> bool:
    """Whether a file holds what its name says."""
    digest = blake3()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == path.stem


def hash_of(data: str | Iterable[Any]) -> str:
    """The hash of a text or of pieces of bytes, as the names have it."""
    digest = blake3()
    pieces: Iterable[Any] = [os.fsencode(data)] if isinstance(data, str) else data
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
