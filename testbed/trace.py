"""Simulates traces of requests to many models, and the hit rates of eviction policies on them.

`results` compares `common.eviction` with other policies in memory for a fifth of all models.
Belady's policy knows the future: optimal for models of equal size and cost, nearly so for others.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from common.eviction import Held, Victims

MODELS, REQUESTS, SEEDS = 100, 6000, 3
MEMORY_SHARE = 0.2  # of the memory of all models
SHORT, LONG = 5, 20  # requests of a burst
SEVERAL = 0.5  # a burst's share of the traffic while it lasts


class Kind(NamedTuple):
    """The popularity of models in a trace, bursts of requests to one model, and scans of all."""

    zipf: float = 1.0  # exponent of the popularity
    bursts: float = 0.02  # probability that a burst begins at a request
    scans: int = 2  # how often all models are requested one after the other
    moves: bool = True  # whether other models become popular after half of the requests
    unlike: bool = False  # whether models differ in size and in loading time


KINDS = {
    "Zipf alone": Kind(bursts=0, scans=0, moves=False),
    "Zipf, bursts, scans": Kind(moves=False),
    "... and then others are popular": Kind(),
    "flatter Zipf (0.8)": Kind(zipf=0.8),
    "many bursts": Kind(bursts=0.06),
    "models of unlike size and cost": Kind(unlike=True),
}


def trace(seed: int, kind: Kind, models: int = MODELS, requests: int = REQUESTS) -> list[int]:
    """Return the number of the requested model, for each request of a random trace."""
    chance = random.Random(seed)  # noqa: S311
    ranked = list(range(models))
    chance.shuffle(ranked)
    popularity = [1 / (rank + 1) ** kind.zipf for rank in range(models)]
    requested: list[int] = []
    burst: list[int] = []
    scans = [requests * (scan + 1) // (kind.scans + 1) for scan in range(kind.scans)]
    moves = requests // 2 if kind.moves else requests
    while len(requested) < requests:
        if scans and len(requested) >= scans[0]:
            del scans[0]
            requested += range(models)
        if len(requested) >= moves:
            moves = requests
            chance.shuffle(ranked)
        if chance.random() < kind.bursts:
            burst += [chance.choice(ranked)] * chance.randint(SHORT, LONG)
        if burst and chance.random() < SEVERAL:
            requested.append(burst.pop(chance.randrange(len(burst))))
        else:
            requested.append(chance.choices(ranked, popularity)[0])
    return requested[:requests]


def models_of(seed: int, kind: Kind, models: int = MODELS) -> dict[int, Held]:
    chance = random.Random(seed)  # noqa: S311
    if not kind.unlike:
        return dict.fromkeys(range(models), Held(1, 1.0))
    return {
        m: Held(chance.choice((1, 1, 1, 4)), chance.choice((1.0, 1.0, 5.0))) for m in range(models)
    }


class LRU:
    """Evicts the least recently used model; the base class of the other policies.

    `use` records a request, `victims` chooses models to evict.
    """

    def __init__(self) -> None:
        self.priority: dict[int, float] = {}

    def use(self, model: int, when: int) -> None:
        self.priority[model] = when

    def victims(self, loaded: dict[int, Held], missing: int) -> Sequence[int]:
        return [min(loaded, key=self.priority.__getitem__)]


class Ours(LRU):
    """The policy of the server, `common.eviction`."""

    def __init__(self) -> None:
        self._victims = Victims[int]()

    def use(self, model: int, when: int) -> None:
        self._victims.used(model)

    def victims(self, loaded: dict[int, Held], missing: int) -> Sequence[int]:
        return self._victims.choose(loaded, missing)


class GDSF(LRU):
    """Greedy-Dual-Size-Frequency: evicts by the least requests since the load * cost / size.

    The priority of the last model evicted is added, so that old models age.
    """

    def __init__(self, models: dict[int, Held]) -> None:
        super().__init__()
        self._models, self._last = models, 0.0
        self._since: Counter[int] = Counter()

    def use(self, model: int, when: int) -> None:
        self._since[model] += 1
        size, cost_s = self._models[model]
        self.priority[model] = self._last + self._since[model] * cost_s / size

    def victims(self, loaded: dict[int, Held], missing: int) -> Sequence[int]:
        (victim,) = super().victims(loaded, missing)
        self._last = self.priority[victim]
        del self._since[victim]
        return [victim]


class Belady(LRU):
    """Evicts the model whose next request is the furthest away."""

    def __init__(self, requested: Sequence[int]) -> None:
        super().__init__()
        self._next = [math.inf] * len(requested)
        later: dict[int, int] = {}
        for when in range(len(requested) - 1, -1, -1):
            self._next[when] = later.get(requested[when], math.inf)
            later[requested[when]] = when

    def use(self, model: int, when: int) -> None:
        self.priority[model] = -self._next[when]


def replay(
    policy: LRU, requested: Sequence[int], models: dict[int, Held], capacity: int
) -> tuple[float, float]:
    """Return the hit rate and the mean seconds of loading per request."""
    loaded: dict[int, Held] = {}
    hits, cost_s = 0, 0.0
    for when, model in enumerate(requested):
        policy.use(model, when)
        if model in loaded:
            hits += 1
            continue
        cost_s += models[model].cost_s
        while loaded:
            missing = sum(h.bytes for h in loaded.values()) + models[model].bytes - capacity
            if missing <= 0:
                break
            for victim in policy.victims(loaded, missing):
                del loaded[victim]
        loaded[model] = models[model]
    return hits / len(requested), cost_s / len(requested)


def policies(requested: Sequence[int], models: dict[int, Held]) -> dict[str, LRU]:
    """Return the policies to compare on a trace, by name."""
    ours, best = Ours(), Belady(requested)
    return {"LRU": LRU(), "GDSF": GDSF(models), "common.eviction": ours, "Belady": best}


def results(
    kind: Kind, models: int = MODELS, requests: int = REQUESTS
) -> dict[str, tuple[float, float]]:
    """Return each policy's hit rate and seconds of loading per request, over `SEEDS` traces."""
    scores: dict[str, list[tuple[float, float]]] = {}
    for seed in range(SEEDS):
        requested, all_models = trace(seed, kind, models, requests), models_of(seed, kind, models)
        capacity = int(MEMORY_SHARE * sum(h.bytes for h in all_models.values()))
        for name, policy in policies(requested, all_models).items():
            scores.setdefault(name, []).append(replay(policy, requested, all_models, capacity))
    return {
        name: (sum(hits for hits, _ in runs) / SEEDS, sum(cost for _, cost in runs) / SEEDS)
        for name, runs in scores.items()
    }
