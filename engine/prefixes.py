"""Keys and values of rows that are done, for prompts that begin as they did.

They have what nobody else wants of the memory: whatever else needs it, those that were not used
for longest go first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.backends.interface import Kept

# To copy a token's keys and values takes so many times less than to compute them.
COPIES = 16


def shared(one: list[int], other: list[int], piece: int) -> int:
    """With how many tokens both begin, in whole pieces."""
    most = min(len(one), len(other))
    length = 0
    while length + piece <= most and one[length : length + piece] == other[length : length + piece]:
        length += piece
    return length


@dataclass(eq=False)
class Prefix:
    owner: Any  # whose model computed them, and can use them
    ids: list[int]  # whole pieces
    kept: Kept
    # An answer's keys and values are those of decode steps, which add up in another order: what of
    # it is wanted, in whole pieces, is computed anew while nobody wants anything else.
    rest: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)  # what followed `ids`, into the answer

    @property
    def text(self) -> list[int]:
        return self.ids + self.rest


class Prefixes:
    """Thread-safe."""

    def __init__(
        self,
        limit_bytes: int,
        room: Callable[[], int] = lambda: 0,
        short: Callable[[], int] = lambda: 0,
    ) -> None:
        """At most `limit_bytes` are kept; 0: nothing is. `room` says how much of the engine's
        memory nobody else wants, `short` what others lack."""
        self.limit_bytes, self._room, self._short = limit_bytes, room, short
        self.num_bytes = 0
        self._found: OrderedDict[Prefix, None] = OrderedDict()  # what was used last is last
        self._lock = threading.RLock()

    def bytes_of(self, owner: object) -> int:
        with self._lock:
            return sum(prefix.kept.num_bytes for prefix in self._found if prefix.owner is owner)

    def wants(self, owner: object, text: list[int], size: int) -> bool:
        """Whether it is worth keeping these tokens, of so many bytes: they fit, and are not kept
        already."""
        if not text or size > self._limit():
            return False
        short = self._short()
        if short > 0:
            self.shrink(short)
            return False
        with self._lock:
            for prefix in self._of(owner):
                if prefix.text[: len(text)] == text:
                    self._found.move_to_end(prefix)
                    return False
        return True

    def add(self, prefix: Prefix) -> None:
        """Keeps one, in place of those that are the beginning of it."""
        with self._lock:
            text = prefix.text
            for other in self._of(prefix.owner):
                if text[: len(other.text)] == other.text and len(other.ids) <= len(prefix.ids):
                    self._remove(other)
            self._found[prefix] = None
            self.num_bytes += prefix.kept.num_bytes
        self.shrink()

    def longest(self, owner: object, ids: list[int], piece: int) -> tuple[Prefix | None, int]:
        """The one that has the most of the first `ids`, and how many. Whoever uses it holds it,
        also if it goes meanwhile."""
        with self._lock:
            found = [(shared(prefix.ids, ids, piece), prefix) for prefix in self._of(owner)]
            length, prefix = max(found, key=lambda one: one[0], default=(0, None))
            if not length or prefix is None:
                return None, 0
            self._found.move_to_end(prefix)
        return prefix, length

    def unfinished(self) -> list[Prefix]:
        """Those of which more is wanted, what was used last first."""
        with self._lock:
            return [prefix for prefix in reversed(self._found) if prefix.rest]

    def take(self, prefix: Prefix) -> bool:
        """Removes one, unless it has gone."""
        with self._lock:
            if prefix not in self._found:
                return False
            self._remove(prefix)
            return True

    def shrink(self, wanted: int = 0) -> int:
        """Gives up what there is no room for any more, at least `wanted` bytes, if there are so
        many. Says how many it were."""
        with self._lock:
            before = self.num_bytes
            if before:
                most = min(self._limit(), before - wanted)
                while self._found and self.num_bytes > most:
                    self._remove(next(iter(self._found)))
            return before - self.num_bytes

    def drop(self, owner: object) -> None:
        """Gives up all of one owner."""
        with self._lock:
            for prefix in self._of(owner):
                self._remove(prefix)

    def _of(self, owner: object) -> list[Prefix]:
        return [prefix for prefix in self._found if prefix.owner is owner]

    def _remove(self, prefix: Prefix) -> None:
        del self._found[prefix]
        self.num_bytes -= prefix.kept.num_bytes

    def _limit(self) -> int:
        return min(self.limit_bytes, self._room())
