"""Keys and values of a running batch in memory of the system's, page by page."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import OutOfMemory
from engine.backends import mapping

MAX_ROWS = 32
PAGE = mmap.PAGESIZE
FLOAT = np.dtype(np.float32)

Values = NDArray[Any]  # keys and values, fp32 or int8


class MappedKVCache:
    """Keys and values of all rows in one anonymous mapping that takes memory where it is written.

    `array` is (buffers, rows, heads, capacity, head size) with a key and a value buffer for each
    layer. One head of one row is a whole number of pages, so a row can go elsewhere without being
    copied, and without new pages, which cost ten times as much as copying.
    """

    def __init__(
        self,
        buffers: int,
        heads: int,
        head_size: int,
        max_length: int,
        dtype: np.dtype[Any] = FLOAT,
    ) -> None:
        self.lengths: list[int] = []
        self._dtype, self._token_bytes = dtype, dtype.itemsize * head_size
        whole_pages = PAGE // np.gcd(PAGE, self._token_bytes)  # tokens
        self._capacity = int(-(-max_length // whole_pages) * whole_pages)
        self._row_bytes = heads * self._capacity * self._token_bytes
        self._memory, self.array = self._reserve(buffers, MAX_ROWS, heads, head_size)
        self._renew()

    def _reserve(
        self, buffers: int, rows: int, heads: int, head_size: int
    ) -> tuple[mmap.mmap, Values]:
        try:
            memory = mmap.mmap(-1, buffers * rows * self._row_bytes, flags=mapping.RESERVED)
        except OSError as error:
            raise OutOfMemory("there is no address space for keys and values") from error
        shape = (buffers, rows, heads, self._capacity, head_size)
        return memory, np.frombuffer(memory, self._dtype).reshape(shape)

    def _renew(self) -> None:
        """Gives all memory back, and makes one mapping of the many that rows leave which came from
        elsewhere."""
        everything = mmap.PROT_READ | mmap.PROT_WRITE
        mapping.map_over(self.array.ctypes.data, self.array.nbytes, everything, mapping.RESERVED)
        # A huge page would hold 2 MiB for a first token, 288 times over in the full-size model.
        with suppress(OSError):  # a kernel that has none
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    @property
    def num_bytes(self) -> int:
        return sum(map(self._bytes, self.lengths))

    def num_bytes_for(self, lengths: Sequence[int]) -> int:
        buffers, _, heads = self.array.shape[:3]
        return sum(lengths) * buffers * heads * self._token_bytes

    def _bytes(self, length: int) -> int:
        """Of the pages that `length` tokens touch."""
        buffers, _, heads = self.array.shape[:3]
        return buffers * heads * self._head_bytes(length)

    def add_row(self) -> int:
        if len(self.lengths) == MAX_ROWS:
            raise OutOfMemory(f"all {MAX_ROWS} rows of the batch are taken")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def move_row(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is, and this one is empty."""
        if source != target:
            self._move(self.array[:, source], self.array[:, target], self.lengths[source])
            self.lengths[target], self.lengths[source] = self.lengths[source], 0

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.array[:, target, :, :length] = self.array[:, source, :, :length]
        self.lengths[target] = length

    def keep_row(self, row: int, length: int) -> KeptRow:
        """The first `length` tokens of a row, which is empty then."""
        buffers, _, heads, _, head_size = self.array.shape
        memory, array = self._reserve(buffers, 1, heads, head_size)
        kept = KeptRow(memory, array[:, 0], length, self._bytes(length))
        self._move(self.array[:, row], kept.array, self.lengths[row])
        self._cut(kept.array, self.lengths[row], length)
        self.lengths[row] = 0
        return kept

    def fill_row(self, row: int, kept: KeptRow, length: int, last: bool) -> None:
        """An empty row becomes the first `length` tokens of what was kept: a copy of it, or with
        `last` that itself."""
        if last:
            self._move(kept.array, self.array[:, row], kept.length)
            self._cut(self.array[:, row], kept.length, length)
        else:
            self.array[:, row, :, :length] = kept.array[:, :, :length]
        self.lengths[row] = length

    def remove_last_row(self) -> None:
        self.lengths.pop()
        if self.lengths:
            self._release(self.array[:, len(self.lengths)])
        else:
            self._renew()

    def _release(self, row: Values) -> None:
        for address in _addresses(row):
            mapping.release(address, self._row_bytes)

    def _move(self, source: Values, target: Values, length: int) -> None:
        """Two rows (buffers, heads, capacity, head size): their pages, or where that is not to be
        had, what `length` tokens have on them."""
        pairs = enumerate(zip(_addresses(source), _addresses(target), strict=True))
        for i, (old, new) in pairs:
            if not mapping.move(old, new, self._row_bytes):
                mapping.release(new, self._row_bytes)
                target[i, :, :length] = source[i, :, :length]
                mapping.release(old, self._row_bytes)

    def _cut(self, row: Values, before: int, length: int) -> None:
        """Gives back the pages behind `length` of a row that has had `before` tokens."""
        kept, had = self._head_bytes(length), self._head_bytes(before)
        if kept < had:
            for address in _addresses(row):
                for head in range(address, address + self._row_bytes, row.strides[1]):
                    mapping.release(head + kept, had - kept)

    def _head_bytes(self, length: int) -> int:
        """Bytes of the pages that one head of `length` tokens touches."""
        return -(-length * self._token_bytes // PAGE) * PAGE


def _addresses(row: Values) -> Iterator[int]:
    """Where a row (buffers, heads, capacity, head size) begins in each buffer."""
    first = row.ctypes.data
    return (first + buffer * row.strides[0] for buffer in range(len(row)))


@dataclass
class KeptRow:
    """Keys and values of a row that is done: `array` (buffers, heads, capacity, head size)."""

    memory: mmap.mmap  # the array's
    array: Values
    length: int  # tokens
    num_bytes: int
