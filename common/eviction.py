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

# A request's weight halves after this many further requests per known name. A larger value gives
# old requests more weight. Time does not count: any rate of requests gives the same choice.
HALF_LIFE = 2.0
MAX_NAMES = 4096  # beyond it, the least recently requested name is dropped

Name = TypeVar("Name", bound=Hashable)


class Held(NamedTuple):
    """The memory that unloading a model frees, and the seconds that loading it again takes."""

    bytes: int
    cost_s: float


class Victims(Generic[Name]):
    """Counts the recent requests of each model, and chooses the models to unload."""

    def __init__(self) -> None:
        self._uses: OrderedDict[Name, tuple[float, float]] = OrderedDict()  # count, last request
        self._time = 0.0  # in half-lives

    def used(self, name: Name) -> None:
        """Count a request for the model `name`."""
        uses = self._lately(name)
        self._time += 1 / (HALF_LIFE * max(len(self._uses), 1))
        self._uses[name] = uses + 1, self._time
        self._uses.move_to_end(name)
        if len(self._uses) > MAX_NAMES:
            self._uses.popitem(last=False)

    def choose(self, held: Mapping[Name, Held], missing_bytes: int) -> list[Name]:
        """Choose models of `held` whose unloading frees at least `missing_bytes`.

        No chosen model is superfluous. If all free too little, all are chosen; of models with equal
        value, the first ones.
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
