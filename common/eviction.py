"""Chooses models to unload: those with the least value per byte.

The value of a model is the cost of being without it: how often it was requested lately, times the
seconds of loading it again. Requests of models that are not loaded are counted, too: so a model
keeps its value while it is unloaded, and a scan that requests each model once evicts none that is
in use. `testbed/trace.py` compares this policy with others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

# A request counts half after so many further requests for each known name. Larger: old requests
# count more. It is no time: a hundred requests a second and one an hour give the same choice.
HALF_LIFE = 2.0
MAX_NAMES = 4096  # the least recently requested are forgotten

Name = TypeVar("Name", bound=Hashable)


class Held(NamedTuple):
    """The bytes that unloading frees, and the seconds of loading again."""

    bytes: int
    cost_s: float


class Victims(Generic[Name]):
    """Counts recent requests, and chooses by them."""

    def __init__(self) -> None:
        self._uses: OrderedDict[Name, tuple[float, float]] = OrderedDict()  # how many, at what time
        self._time = 0.0  # in half-lives

    def used(self, name: Name) -> None:
        """Count a request."""
        uses = self._lately(name)
        self._time += 1 / (HALF_LIFE * max(len(self._uses), 1))
        self._uses[name] = uses + 1, self._time
        self._uses.move_to_end(name)
        if len(self._uses) > MAX_NAMES:
            self._uses.popitem(last=False)

    def choose(self, held: Mapping[Name, Held], missing_bytes: int) -> list[Name]:
        """Choose what to unload of `held` for so many bytes, none in vain; all if they are too few.

        Of equals the first are chosen.
        """
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
