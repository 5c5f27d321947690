"""Which models to unload for others: those that are worth the least per byte.

What a model is worth is what it would cost to do without it: how often it was asked for lately,
times the seconds that it takes to bring back. The requests are remembered of models that are not
loaded, too: so one that comes and goes is known for what it is, and a scan that asks for each model
once costs none its place. `benchmarks/switching/trace.py` compares it with others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

# A request counts half after so many requests for each name that is known: the measure of time is
# the requests' own, whether there are a hundred a second or one an hour.
HALF_LIFE = 2.0
KNOWN = 4096

Name = TypeVar("Name", bound=Hashable)


class Held(NamedTuple):
    """What unloading something gives back, and what it takes to load it again."""

    bytes: int
    cost_s: float


class Victims(Generic[Name]):
    """Remembers what was asked for lately, and chooses by that."""

    def __init__(self) -> None:
        self._uses: OrderedDict[Name, tuple[float, float]] = OrderedDict()  # how many, at what time
        self._time = 0.0  # in half-lives

    def used(self, name: Name) -> None:
        """To be called for each request."""
        uses = self._lately(name)
        self._time += 1 / (HALF_LIFE * max(len(self._uses), 1))
        self._uses[name] = uses + 1, self._time
        self._uses.move_to_end(name)
        if len(self._uses) > KNOWN:
            self._uses.popitem(last=False)

    def choose(self, held: Mapping[Name, Held], missing_bytes: int) -> list[Name]:
        """Those of `held` to unload for so many bytes, none of them in vain; all if they are too
        few. Of equals the first go first."""
        worth = {name: self._lately(name) * h.cost_s for name, h in held.items()}
        chosen: list[Name] = []
        freed = 0
        for name in sorted(held, key=lambda name: worth[name] / max(held[name].bytes, 1)):
            if freed >= missing_bytes:
                break
            chosen.append(name)
            freed += held[name].bytes
        for name in sorted(chosen, key=worth.__getitem__, reverse=True):
            if freed - held[name].bytes >= missing_bytes:
                chosen.remove(name)
                freed -= held[name].bytes
        return chosen

    def _lately(self, name: Name) -> float:
        uses, at = self._uses.get(name, (0.0, 0.0))
        return float(uses * 0.5 ** (self._time - at))
