"""The prefix cache: rows of finished sequences, for prompts with the same beginning.

It takes only memory that is free otherwise, and evicts the least recently used rows when weights
or running sequences need more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.interface import BackendModel, Row

Ids = NDArray[np.int32]


def to_ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, np.int32)


def shared_length(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    most = min(len(a), len(b))
    different = np.flatnonzero(a[:most] != b[:most])
    return int(different[0]) if len(different) else most


@dataclass(eq=False)
class Prefix:
    owner: object  # the model whose prompts may begin with the row
    ids: Ids  # the tokens of the row
    row: Row
    model: BackendModel


class Prefixes:
    """The cached rows of all models. Thread-safe."""

    def __init__(
        self,
        limit_bytes: int,
        available: Callable[[], int] = lambda: 0,
        shortage: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create an empty cache of at most `limit_bytes`, and at most `available()` bytes.

        `available` returns the free bytes of the budget, `shortage` the bytes that other processes
        lack.
        """
        self.limit_bytes, self._available, self._shortage = limit_bytes, available, shortage
        self.num_bytes = 0
        self._prefixes: OrderedDict[Prefix, None] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()

    def bytes_of(self, owner: object) -> int:
        with self._lock:
            return sum(prefix.row.num_bytes for prefix in self._of(owner))

    def add(self, prefix: Prefix) -> bool:
        """Cache a row in place of its prefixes; return False if it was not cached."""
        size = prefix.row.num_bytes
        if not len(prefix.ids) or size > self._limit():
            return False
        if (missing := self._shortage()) > 0:
            self.shrink(missing)
            return False
        with self._lock:
            for other in self._of(prefix.owner):
                length = shared_length(prefix.ids, other.ids)
                if length == len(prefix.ids):
                    self._prefixes.move_to_end(other)
                    return False
                if length == len(other.ids):
                    self._remove(other)
            self._prefixes[prefix] = None
            self.num_bytes += size
        self.shrink()
        return True

    def open_row(self, owner: object, ids: Ids, more_than: int = 0) -> Row | None:
        """Open a row with the longest cached prefix of `ids`, if longer than `more_than` tokens."""
        with self._lock:  # so that the prefix is not evicted meanwhile
            of_owner = [(shared_length(prefix.ids, ids), prefix) for prefix in self._of(owner)]
            length, prefix = max(of_owner, key=lambda entry: entry[0], default=(0, None))
            if prefix is None or length <= more_than:
                return None
            self._prefixes.move_to_end(prefix)
            return prefix.model.open_row(prefix.row, length)

    def shrink(self, wanted: int = 0) -> int:
        """Evict rows beyond the limit, and at least `wanted` bytes; return the bytes evicted."""
        with self._lock:
            before = self.num_bytes
            if before:
                most = min(self._limit(), before - wanted)
                while self._prefixes and self.num_bytes > most:
                    self._remove(next(iter(self._prefixes)))
            return before - self.num_bytes

    def drop(self, owner: object) -> None:
        """Evict all rows of an owner."""
        with self._lock:
            for prefix in self._of(owner):
                self._remove(prefix)

    def drop_rows_of(self, model: BackendModel) -> None:
        """Evict all rows that a backend model has computed."""
        with self._lock:
            for prefix in [prefix for prefix in self._prefixes if prefix.model is model]:
                self._remove(prefix)

    def _of(self, owner: object) -> list[Prefix]:
        return [prefix for prefix in self._prefixes if prefix.owner is owner]

    def _remove(self, prefix: Prefix) -> None:
        del self._prefixes[prefix]
        self.num_bytes -= prefix.row.num_bytes
        prefix.model.close_row(prefix.row)

    def _limit(self) -> int:
        return min(self.limit_bytes, self._available())
