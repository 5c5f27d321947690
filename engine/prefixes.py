"""The prefix cache: rows of finished sequences, for prompts that begin as they did.

It takes memory that nothing else needs: the least recently used rows go as soon as something does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.interface import BackendModel, Row

Ids = NDArray[np.int32]


def to_ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, np.int32)


def shared_length(one: Ids, other: Ids) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    different = np.flatnonzero(one[:most] != other[:most])
    return int(different[0]) if len(different) else most


@dataclass(eq=False)
class Prefix:
    owner: object  # whose prompts may begin with the row: a batch, or one of its models
    ids: Ids  # of the row's tokens
    row: Row
    model: BackendModel


class Prefixes:
    """Thread-safe."""

    def __init__(
        self,
        limit_bytes: int,
        available: Callable[[], int] = lambda: 0,
        short: Callable[[], int] = lambda: 0,
    ) -> None:
        """Keeps at most `limit_bytes`, and at most what `available` returns: the engine's memory
        that nothing else needs. `short` returns what other processes lack."""
        self.limit_bytes, self._available, self._short = limit_bytes, available, short
        self.num_bytes = 0
        self._kept: OrderedDict[Prefix, None] = OrderedDict()  # the least recently used is first
        self._lock = threading.RLock()

    def bytes_of(self, owner: object) -> int:
        with self._lock:
            return sum(prefix.row.num_bytes for prefix in self._of(owner))

    def add(self, prefix: Prefix) -> bool:
        """Keeps a row, in place of those that are the beginning of it.

        Returns False where it is not kept: it does not fit, or another one begins with all of it.
        """
        size = prefix.row.num_bytes
        if not len(prefix.ids) or size > self._limit():
            return False
        if (short := self._short()) > 0:
            self.shrink(short)
            return False
        with self._lock:
            for other in self._of(prefix.owner):
                length = shared_length(prefix.ids, other.ids)
                if length == len(prefix.ids):
                    self._kept.move_to_end(other)
                    return False
                if length == len(other.ids):
                    self._remove(other)
            self._kept[prefix] = None
            self.num_bytes += size
        self.shrink()
        return True

    def open_row(self, owner: object, ids: Ids, more_than: int = 0) -> Row | None:
        """Opens a row that begins with as many of the first `ids` as a kept one does, where those
        are more than `more_than`."""
        with self._lock:  # it is not evicted meanwhile
            of_owner = [(shared_length(prefix.ids, ids), prefix) for prefix in self._of(owner)]
            length, prefix = max(of_owner, key=lambda found: found[0], default=(0, None))
            if prefix is None or length <= more_than:
                return None
            self._kept.move_to_end(prefix)
            return prefix.model.open_row(prefix.row, length)

    def shrink(self, wanted: int = 0) -> int:
        """Evicts what there is no memory for, and `wanted` bytes if there are so many. Returns how
        many bytes were evicted."""
        with self._lock:
            before = self.num_bytes
            if before:
                most = min(self._limit(), before - wanted)
                while self._kept and self.num_bytes > most:
                    self._remove(next(iter(self._kept)))
            return before - self.num_bytes

    def drop(self, owner: object) -> None:
        """Evicts all rows of one owner."""
        with self._lock:
            for prefix in self._of(owner):
                self._remove(prefix)

    def drop_rows_of(self, model: BackendModel) -> None:
        """Evicts all rows that a model has computed."""
        with self._lock:
            for prefix in [prefix for prefix in self._kept if prefix.model is model]:
                self._remove(prefix)

    def _of(self, owner: object) -> list[Prefix]:
        return [prefix for prefix in self._kept if prefix.owner is owner]

    def _remove(self, prefix: Prefix) -> None:
        del self._kept[prefix]
        self.num_bytes -= prefix.row.num_bytes
        prefix.model.close_row(prefix.row)

    def _limit(self) -> int:
        return min(self.limit_bytes, self._available())


def prefix_of(owner: Any, model: BackendModel, row: Row, ids: Sequence[int]) -> Prefix:
    """The prefix that a finished sequence's row is: of its `ids` those that were computed."""
    return Prefix(owner, to_ids(ids[: row.length]), row, model)
