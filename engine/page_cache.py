"""Brings pieces of files into memory before they are computed with.

A step that meets a page that is not there waits for the disk, and every model with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MADV_POPULATE_READ = 22  # Linux 5.14
PAGE = mmap.PAGESIZE
CHUNK_BYTES = 1 << 20

# `CDLL` lets other threads run during a call, which Python's own mmap does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


Piece = tuple[Path, int, int]  # a file, where the piece begins, which is a page, and its length


def read_in(pieces: Iterable[Piece]) -> int:
    """Reads what is not in memory and waits for it. Returns how many bytes that were.

    A file that is gone is passed over: whoever has it mapped reads it page by page. Linux says of
    a file that is not this user's that all of it is there.
    """
    missing = [
        (path, offset + begin, end - begin)
        for path, offset, length in pieces
        for begin, end in _missing(path, offset, length)
    ]
    for path, offset, length in missing:  # all are under way before the first is waited for
        with suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
    for piece in missing:
        with suppress(OSError, ValueError):
            _wait(*piece)
    return sum(length for _, _, length in missing)


def _missing(path: Path, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """The parts of a piece that are not in memory: where they begin and end."""
    try:
        with path.open("rb", buffering=0) as file:
            memory = _map(file.fileno(), offset, length)
    except (OSError, ValueError):
        return
    there = np.ones(-(-length // PAGE) + 2, dtype=np.uint8)
    if _libc.mincore(memory.ctypes.data, length, there[1:].ctypes.data) != 0:
        return
    edges = np.flatnonzero(np.diff(there & 1))  # in turns, the first that is missing and is not
    for first, last in edges.reshape(-1, 2):
        yield int(first) * PAGE, min(int(last) * PAGE, length)


def _wait(path: Path, offset: int, length: int) -> None:
    with path.open("rb", buffering=0) as file:
        memory = _map(file.fileno(), offset, length)
        if _libc.madvise(memory.ctypes.data, length, MADV_POPULATE_READ) == 0:
            return
        buffer = memoryview(bytearray(CHUNK_BYTES))  # an older kernel
        for begin in range(0, length, CHUNK_BYTES):
            os.preadv(file.fileno(), [buffer[: length - begin]], offset + begin)


def _map(descriptor: int, offset: int, length: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=offset)
    return np.frombuffer(memory, dtype=np.uint8)
