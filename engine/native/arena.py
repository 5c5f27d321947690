"""The arena: K/V pages of all models of one shape, in one anonymous mapping."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

import numpy as np

from common.errors import OutOfMemory
from engine.backends.page_cache import advise_dontneed
from engine.native.library import PAGE_TOKENS

MAP_NORESERVE = 0x4000  # Linux; in Python's mmap from 3.13 on
MAX_BYTES = 64 << 30  # of address space; memory is allocated where it is written
MIN_BYTES = 1 << 30


class Arena:
    """Pages with reference counts: rows with the same prefix share them. Thread-safe.

    A free page keeps its memory until `trim`: the next row takes it without page faults.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._memory = _reserve()
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._count = len(self._memory) // page_bytes
        self._references = np.zeros(self._count, np.uint32)
        self._free: list[int] = []  # pages that were used before; the last is taken first
        self._used = 0  # pages from this one on hold no memory
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int]:
        """Take free pages; returns their numbers. Raises `OutOfMemory` if too few are free."""
        with self._lock:
            again = min(count, len(self._free))
            if count - again > self._count - self._used:
                raise OutOfMemory(f"all {self._count} pages of keys and values are in use")
            pages = [self._free.pop() for _ in range(again)]
            pages += range(self._used, self._used + count - again)
            self._used += count - again
            self._references[pages] = 1
            return pages

    def share(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._references[pages] += 1

    def release(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._references[pages] -= 1
            self._free += [page for page in reversed(pages) if not self._references[page]]

    def copy(self, page: int) -> int:
        """Take a free page and copy another into it."""
        [new] = self.take(1)
        size = self.page_bytes
        ctypes.memmove(self.address + new * size, self.address + page * size, size)
        return new

    def trim(self) -> None:
        """Return the memory of free pages to the operating system."""
        with self._lock:
            self._free.sort(reverse=True)  # the next rows take the first pages
            last = 0  # of the free pages, how many are the last that were used
            while last < len(self._free) and self._free[last] == self._used - 1:
                last += 1
                self._used -= 1
            del self._free[:last]
            free = np.array([*self._free[::-1], self._used], np.int64)
            starts = np.flatnonzero(np.diff(free, prepend=-2) > 1)  # of runs of neighbors
            ends = np.append(free[starts[1:] - 1] + 1, self._count)  # the last takes the rest
            for first, end in zip(free[starts].tolist(), ends.tolist(), strict=True):
                begin = -(-first * self.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = end * self.page_bytes // mmap.PAGESIZE * mmap.PAGESIZE
                if stop > begin:
                    advise_dontneed(self.address + begin, stop - begin)


def _reserve() -> mmap.mmap:
    size, flags = MAX_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    while True:
        try:
            memory = mmap.mmap(-1, size, flags=flags)
        except OSError as error:  # the address space is limited
            if size <= MIN_BYTES:
                raise OutOfMemory("there are no addresses for keys and values") from error
            size //= 2
        else:
            return memory


class NativeRow:
    """Keys and values of one sequence: its pages, and how many tokens they hold."""

    def __init__(self, arena: Arena, max_length: int) -> None:
        self.length = 0
        self._arena = arena
        self.table = np.zeros(-(-max_length // PAGE_TOKENS), np.int32)  # numbers of the pages
        self.address = self.table.ctypes.data
        self._count = 0  # pages

    @property
    def num_bytes(self) -> int:
        return self._count * self._arena.page_bytes

    @property
    def pages(self) -> list[int]:
        pages: list[int] = self.table[: self._count].tolist()
        return pages

    def begin_with(self, source: NativeRow, length: int) -> None:
        """Share another row's full pages of its first `length` tokens; copy the one not full."""
        whole, rest = divmod(length, PAGE_TOKENS)
        shared = source.pages[:whole]
        self._arena.share(shared)
        self.table[:whole] = shared
        self._count = whole
        if rest:
            try:
                self.table[whole] = self._arena.copy(source.pages[whole])
            except BaseException:
                self.truncate(0)
                raise
            self._count += 1
        self.length = length

    def reserve(self, length: int) -> None:
        """Take pages until the row has space for `length` tokens. Raises `OutOfMemory`."""
        count = -(-length // PAGE_TOKENS)
        if count > self._count:
            self.table[self._count : count] = self._arena.take(count - self._count)
            self._count = count

    def truncate(self, length: int) -> None:
        """Cut the row to its first `length` tokens; release the pages after them."""
        count = -(-length // PAGE_TOKENS)
        if count < self._count:
            pages = self.pages[count:]
            self._count = count
            self._arena.release(pages)
        self.length = min(self.length, length)
