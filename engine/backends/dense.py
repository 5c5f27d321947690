"""Models with all rows in one dense K/V cache, as graphs for GPUs need them.

A pass of such a graph appends as many tokens to each of some neighboring rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import OutOfMemory
from engine.artifacts.config import GPT2Config
from engine.backends.interface import BackendModel, Logits, Piece, Row, check_ids

Ids = NDArray[np.int64]

BLOCK = 64  # positions that a cache grows by. Larger: more memory. Smaller: more copies
MAX_ROWS = 32


class DenseCache(ABC):
    """Keys and values of rows 0..len(lengths)-1, in memory with space for more rows.

    All rows have the same capacity, which grows as `shape_for` computes until no row remains.
    """

    def __init__(self, config: GPT2Config, token_bytes: int) -> None:
        self.config, self.token_bytes = config, token_bytes
        self.lengths: list[int] = []  # of each row, in tokens

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """The number of rows and the capacity in tokens that are allocated."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.token_bytes

    def shape_for(self, rows: int, length: int) -> tuple[int, int]:
        """The shape (rows, capacity) that `rows` rows of `length` tokens need.

        The capacity grows in blocks of `BLOCK` positions up to the longest context, the rows to the
        next power of two; neither shrinks.
        """
        blocks = -(-length // BLOCK)
        capacity = min(max(self.shape[1], blocks * BLOCK), self.config.max_length)
        return max(self.shape[0], 1 << (rows - 1).bit_length()), capacity

    def num_bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the bytes of the cache if it had rows of these lengths."""
        if not lengths:
            return 0
        return math.prod(self.shape_for(len(lengths), max(lengths))) * self.token_bytes

    def add_row(self) -> int:
        if len(self.lengths) == MAX_ROWS:
            raise OutOfMemory(f"all {MAX_ROWS} rows of the batch are taken")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of a row those of another. Raises `OutOfMemory`."""
        if length:
            self._copy(source, target, length)
        self.lengths[target] = length

    @abstractmethod
    def _copy(self, source: int, target: int, length: int) -> None:
        """Grow if needed, copy at least the first `length` tokens of a row, and wait for that."""

    def remove_last_row(self) -> None:
        self.lengths.pop()
        if not self.lengths:
            self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Free all memory, once there are no rows."""


@dataclass(eq=False)
class DenseRow:
    cache: DenseCache
    index: int

    @property
    def length(self) -> int:
        return self.cache.lengths[self.index]

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes // max(len(self.cache.lengths), 1)


class DenseModel(BackendModel):
    """A model that computes pieces of one token together, and all others one by one."""

    max_rows = MAX_ROWS - 1  # and one to swap rows
    caches_rows = False
    _cache: DenseCache

    def __init__(self) -> None:
        self._rows: list[DenseRow] = []

    @abstractmethod
    def compute(self, begin: int, ids: Ids) -> Logits:
        """Compute `ids` (B, T) behind rows begin..begin+B-1; return the logits (B, V) of the last.

        T is 1 where B is not. Stores keys and values, but leaves the lengths of the rows.
        """

    def _append(self, begin: int, ids: Ids) -> Logits:
        """Append `ids` (B, T) to rows; return a copy of the logits (B, V) after the last."""
        logits = self.compute(begin, ids).copy()
        for row in range(begin, begin + len(ids)):  # last: a failed pass appends nothing
            self._cache.lengths[row] += ids.shape[1]
        return logits

    def open_row(self, source: Row | None = None, length: int = 0) -> DenseRow:
        row = DenseRow(self._cache, self._cache.add_row())
        self._rows.append(row)
        if isinstance(source, DenseRow) and length:
            try:
                self._cache.copy_row(source.index, row.index, length)
            except BaseException:
                self.close_row(row)
                raise
        return row

    def truncate(self, row: Row, length: int) -> None:
        assert isinstance(row, DenseRow)
        self._cache.lengths[row.index] = length

    def close_row(self, row: Row) -> None:
        assert isinstance(row, DenseRow)
        last = self._rows.pop()
        if last is not row:
            self._cache.copy_row(last.index, row.index, last.length)
            self._rows[row.index], last.index = last, row.index
        self._cache.remove_last_row()

    def run(self, pieces: Sequence[Piece]) -> Logits:
        for piece in pieces:
            check_ids(self.config, piece)
        parts: dict[int, Logits] = {}
        steps = [i for i, piece in enumerate(pieces) if len(piece.ids) == 1 and piece.num_logits]
        steps.sort(key=lambda i: _index(pieces[i].row))
        if len(self._rows) == self._cache.shape_for(len(self._rows), 1)[0]:
            # A swap needs a free row, for which the cache would grow.
            steps = [i for j, i in enumerate(steps) if _index(pieces[i].row) == j]
        if len(steps) > 1:
            self._bring_to_front([pieces[i].row for i in steps])
            logits = self._append(0, np.array([pieces[i].ids for i in steps]))
            parts = {i: logits[j : j + 1] for j, i in enumerate(steps)}
        for i, piece in enumerate(pieces):
            if i not in parts:
                parts[i] = self._extend(piece)
        empty = np.empty((0, self.config.vocab_size), np.float32)
        return np.concatenate([empty, *(parts[i] for i in range(len(pieces)))])

    def _extend(self, piece: Piece) -> Logits:
        """Compute one piece; return its logits (num_logits, V)."""
        assert isinstance(piece.row, DenseRow)
        row, ids = piece.row.index, np.array([piece.ids])
        first = len(piece.ids) - max(piece.num_logits - 1, 0)  # a pass gives one logits row
        parts = np.split(ids, range(first, len(piece.ids)), axis=1)
        logits = np.concatenate([self._append(row, part) for part in parts])
        return logits[: piece.num_logits]

    def _bring_to_front(self, rows: Sequence[Row]) -> None:
        """Swap rows of the cache, so that these become rows 0, 1, ... in this order."""
        for index, row in enumerate(rows):
            assert isinstance(row, DenseRow)
            if row.index != index:
                other, free = self._rows[index], self._cache.add_row()
                try:
                    self._cache.copy_row(index, free, other.length)
                    self._cache.copy_row(row.index, index, row.length)
                    self._cache.copy_row(free, row.index, self._cache.lengths[free])
                finally:
                    self._cache.remove_last_row()
                self._rows[row.index], other.index = other, row.index
                self._rows[index], row.index = row, index

    def kv_bytes_for(self, lengths: Sequence[int]) -> int:
        return self._cache.num_bytes_for(lengths)

    @property
    def kv_bytes(self) -> int:
        return self._cache.num_bytes


def _index(row: Row) -> int:
    assert isinstance(row, DenseRow)
    return row.index
