"""The prefix cache: rows of finished sequences, for prompts with the same beginning.

It takes only memory that is free otherwise, and evicts the least recently used rows when weights
or running sequences need more.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.backends.interface import BackendModel, Row

TOKEN = np.dtype(">i4")  # of a key: big-endian, so that keys sort as the lists of ids do


def key_of(ids: Sequence[int]) -> bytes:
    """Return ids that are not negative as bytes, for `Prefix` and `shared_length`."""
    return np.array(ids, TOKEN).tobytes()


def shared_length(a: bytes, b: bytes) -> int:
    """Return how many tokens the common prefix of two keys has."""
    most = min(len(a), len(b)) // TOKEN.itemsize
    different = np.flatnonzero(np.frombuffer(a, TOKEN, most) != np.frombuffer(b, TOKEN, most))
    return int(different[0]) if len(different) else most


@dataclass(eq=False)
class Prefix:
    owner: object  # the model whose prompts may begin with the row
    key: bytes  # the tokens of the row, see `key_of`
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
        # The same by owner, sorted by key. No key is a prefix of another of the same owner, so the
        # longest match of a prompt is beside the place where the prompt itself would be.
        self._sorted: dict[object, list[Prefix]] = {}
        self._lock = threading.RLock()

    def bytes_of(self, owner: object) -> int:
        with self._lock:
            return sum(prefix.row.num_bytes for prefix in self._sorted.get(owner, ()))

    def add(self, prefix: Prefix) -> bool:
        """Cache a row in place of its prefixes; return False if it was not cached."""
        size = prefix.row.num_bytes
        if not prefix.key or size > self._limit():
            return False
        if (missing := self._shortage()) > 0:
            self.shrink(missing)
            return False
        with self._lock:
            at, beside = self._place(prefix.owner, prefix.key)
            for other in beside:
                if other.key.startswith(prefix.key):
                    self._prefixes.move_to_end(other)
                    return False
                if prefix.key.startswith(other.key):  # it is the one before
                    self._remove(other)
                    at -= 1
            self._sorted.setdefault(prefix.owner, []).insert(at, prefix)
            self._prefixes[prefix] = None
            self.num_bytes += size
        self.shrink()
        return True

    def open_row(self, owner: object, key: bytes, more_than: int = 0) -> Row | None:
        """Open a row with the longest cached prefix of `key`, if longer than `more_than` tokens."""
        with self._lock:  # so that the prefix is not evicted meanwhile
            _, beside = self._place(owner, key)
            matches = [(shared_length(prefix.key, key), prefix) for prefix in beside]
            length, prefix = max(matches, key=lambda match: match[0], default=(0, None))
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
            for prefix in list(self._sorted.get(owner, ())):
                self._remove(prefix)

    def drop_rows_of(self, model: BackendModel) -> None:
        """Evict all rows that a backend model has computed."""
        with self._lock:
            for prefix in [prefix for prefix in self._prefixes if prefix.model is model]:
                self._remove(prefix)

    def _place(self, owner: object, key: bytes) -> tuple[int, list[Prefix]]:
        """Return where a key belongs among its owner's, and the prefixes before and after it."""
        prefixes = self._sorted.get(owner, [])
        at = bisect_left(prefixes, key, key=lambda prefix: prefix.key)
        return at, prefixes[max(at - 1, 0) : at + 1]

    def _remove(self, prefix: Prefix) -> None:
        del self._prefixes[prefix]
        of_owner = self._sorted[prefix.owner]
        del of_owner[self._place(prefix.owner, prefix.key)[0]]
        if not of_owner:
            del self._sorted[prefix.owner]
        self.num_bytes -= prefix.row.num_bytes
        prefix.model.close_row(prefix.row)

    def _limit(self) -> int:
        return min(self.limit_bytes, self._available())
