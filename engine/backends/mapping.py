"""Memory that is mapped at given addresses: files, pages that come from elsewhere, or nothing."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux; the second in Python's mmap from 3.13 on
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # takes memory where written
# MAYMOVE, FIXED, and DONTUNMAP, which Linux has from 5.7 on: the old addresses stay mapped.
MOVE = 1 | 2 | 4
FAILED = ctypes.c_void_p(-1).value

_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = _address
_libc.mmap.argtypes = [_address, _size, _int, _int, _int, ctypes.c_long]
_libc.mremap.argtypes = [_address, _size, _size, _int, _address]
_libc.madvise.argtypes = [_address, _size, _int]


def map_over(
    address: int, size: int, protection: int, flags: int, file: int = -1, offset: int = 0
) -> None:
    """In place of what is mapped there. Raises `OSError`."""
    size = -(-size // PAGE) * PAGE
    if _libc.mmap(address, size, protection, flags | MAP_FIXED, file, offset) == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def move(source: int, target: int, size: int) -> bool:
    """The pages at address `source` lie at `target` then, in place of what did, and zeros where
    they lay. Says whether it was done: an old kernel cannot, nor may a process have more mappings
    than some 65,000. Nothing has changed then."""
    return bool(_libc.mremap(source, size, size, MOVE, target) != FAILED)


def release(address: int, size: int) -> None:
    """Gives pages back; they are zeros then."""
    _libc.madvise(address, size, mmap.MADV_DONTNEED)
