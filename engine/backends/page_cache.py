"""Reads mapped files into memory before they are computed with, and advises their eviction.

A step that touches a page that is not in memory waits for the disk, and every model with it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

MADV_COLD = 20  # Linux 5.4
MADV_POPULATE_READ = 22  # Linux 5.14
PAGE = mmap.PAGESIZE

_disk = threading.Lock()

Span = tuple[int, int]  # of mapped memory: page-aligned address, and length in bytes

# `CDLL` lets other threads run during a call, which Python's own mmap does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def read_in(spans: Iterable[Span]) -> int:
    """Read the pages that are not in memory, and map all pages; return the bytes read.

    Linux reports all pages of another user's file as present; such a file is read as well, but page
    after page.
    """
    spans = list(spans)
    missing = [part for span in spans for part in _missing(*span)]
    # One caller reads at a time: if two read at once, the first would finish as late as the second.
    with _disk if missing else nullcontext():
        for part in missing:  # start all reads before waiting for any
            _libc.madvise(*part, mmap.MADV_WILLNEED)
        for span in spans:
            _populate(*span)
    return sum(length for _, length in missing)


def advise_cold(spans: Iterable[Span]) -> None:
    """Advise the kernel to evict these pages first, not those just read for another model."""
    for span in spans:
        _libc.madvise(*span, MADV_COLD)


def advise_dontneed(address: int, length: int) -> None:
    """Return the memory of anonymous pages to the system; they are zeros from now on."""
    _libc.madvise(address, length, mmap.MADV_DONTNEED)


def present(address: int, length: int) -> NDArray[np.uint8]:
    """Return for each page of a span 1 if it is in memory, otherwise 0. Raises `OSError`."""
    pages = np.zeros(-(-length // PAGE), dtype=np.uint8)
    if _libc.mincore(address, length, pages.ctypes.data) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mincore: {os.strerror(code)}")
    return pages & np.uint8(1)


def bytes_at(address: int, length: int) -> NDArray[np.uint8]:
    """Return a view of memory, which must outlive the view."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    memory: NDArray[np.uint8] = np.ctypeslib.as_array(pointer, (length,))
    return memory


def _missing(address: int, length: int) -> Iterator[Span]:
    """Yield the parts of a span that are not in memory."""
    try:
        there = present(address, length)
    except OSError:
        return
    if there.all():
        return
    changes = np.diff(there, prepend=np.uint8(1), append=np.uint8(1))
    edges = np.flatnonzero(changes) * PAGE  # begin and end of each missing part, in turns
    for begin, end in edges.reshape(-1, 2):
        yield address + int(begin), min(int(end), length) - int(begin)


def _populate(address: int, length: int) -> None:
    """Map and read the pages. Raises `OSError` where the disk fails."""
    if _libc.madvise(address, length, MADV_POPULATE_READ) == 0:
        return
    if (code := ctypes.get_errno()) != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    bytes_at(address, length)[::PAGE].max()  # touch each page on an older kernel
