"""What hashing by model is worth to a fleet of many servers and ten thousand fine-tunes.

    python -m benchmarks.fleet.simulation          a minute or two
    python -m benchmarks.fleet.simulation --seed 2

Requests come at random times, for models by Zipf's law. A server works on SLOTS at once, has ROOM
models in memory and DISK on its disk, the least recently used go; what is not in memory is loaded,
what is not on the disk is fetched from S3 and prepared first, and others wait for the same load.
Everything begins as it is after hours. A proxy chooses the server: by consistent hashing (`hash`),
the same with bounded load (`bounded`, as deploy/haproxy says it), or at random. In the middle one
server of 16 fails, and others have its share until it is back with nothing; then all are replaced,
one by one.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.report.tables import table

FINE_TUNES = 10_000
# Of a server with two cores and 8 GiB (docs/operations.md, docs/benchmark.md): int8, eight rows
# that share steps make 561 tokens a second, and an answer has 16.
SLOTS, ANSWER_S = 8, 16 * 8 / 561
ROOM, DISK = 36, 400
LOAD_S, FETCH_S, FETCH_BYTES = 0.3, 4.0, 250_000_000
DOLLARS = 0.115  # ml.m5.large in scripts/aws/instances.json
SECONDS = 30.0
PLACES, NEAR = 64, 1
FACTOR = 1.5  # haproxy's hash-balance-factor


@dataclass
class Server:
    """hot, cold: models in memory and on the disk, the least recently used first; free: when each
    slot is; loading: until when a model is loaded"""

    up: bool = True
    hot: OrderedDict[int, None] = field(default_factory=OrderedDict)
    cold: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free: list[float] = field(default_factory=lambda: [0.0] * SLOTS)
    loading: dict[int, float] = field(default_factory=dict)
    busy: int = 0

    def forget(self) -> None:
        self.hot.clear()
        self.cold.clear()
        self.loading.clear()

    def take(self, model: int, now: float, seen: Seen) -> float:
        """When the model is there."""
        if model in self.hot:
            self.hot.move_to_end(model)
            ready = self.loading.get(model, now)
            seen.hits += ready <= now
            return max(ready, now)
        took_s = LOAD_S
        if model not in self.cold:
            took_s += FETCH_S
            seen.bytes += FETCH_BYTES
        _keep(self.hot, model, ROOM)
        _keep(self.cold, model, DISK)
        self.loading[model] = now + took_s
        return now + took_s

    def compute(self, now: float) -> float:
        """When an answer to a model that is there is made."""
        start = max(heapq.heappop(self.free), now)
        heapq.heappush(self.free, start + ANSWER_S)
        return start + ANSWER_S


@dataclass
class Seen:
    hits: int = 0
    bytes: int = 0
    took_s: list[float] = field(default_factory=list)


def _keep(models: OrderedDict[int, None], model: int, most: int) -> None:
    models[model] = None
    models.move_to_end(model)
    if len(models) > most:
        models.popitem(last=False)


class Ring:
    def __init__(self, servers: int) -> None:
        places = [
            (_hash(f"{server}/{place}"), server)
            for server in range(servers)
            for place in range(PLACES)
        ]
        places.sort()
        self._hashes = [place for place, _ in places]
        self._servers = [server for _, server in places]

    def order(self, key: int) -> list[int]:
        """Servers from the key's place on: the first few of them, and then all."""
        at, count = bisect.bisect(self._hashes, key), len(self._servers)
        near = dict.fromkeys(self._servers[(at + step) % count] for step in range(NEAR * PLACES))
        return [*near, *(server for server in sorted(set(self._servers)) if server not in near)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def popular(fine_tunes: int) -> list[float]:
    """Cumulated shares of the models, the most popular first."""
    weights = [1 / (rank + 1) for rank in range(fine_tunes)]
    total = sum(weights)
    return [cumulated / total for cumulated in itertools.accumulate(weights)]


def settled(policy: str, servers: int, orders: list[list[int]]) -> list[Server]:
    """Each with the most popular of the models that it is asked for."""
    fleet = [Server() for _ in range(servers)]
    for model, order in enumerate(orders):
        for number in range(servers) if policy == "random" else order[:1]:
            server = fleet[number]
            for models, most in ((server.hot, ROOM), (server.cold, DISK)):
                if len(models) < most:
                    models[model] = None
                    models.move_to_end(model, last=False)
    return fleet


def simulate(
    policy: str, fine_tunes: int, servers: int, rate: float, seconds: float, seed: int
) -> Seen:
    """`rate` in requests a second."""
    chance = random.Random(seed)  # noqa: S311
    shares, ring = popular(fine_tunes), Ring(servers)
    orders = [ring.order(_hash(f"model-{model}")) for model in range(fine_tunes)]
    fleet = settled(policy, servers, orders)
    events = sorted(_events(servers, seconds), reverse=True)
    seen, now, in_flight = Seen(), 0.0, 0
    # When, whether its model is there only now, of which server, and when it came.
    coming: list[tuple[float, bool, int, float]] = []

    def until(now: float) -> None:
        nonlocal in_flight
        while coming and coming[0][0] <= now:
            when, begins, number, came = heapq.heappop(coming)
            if begins:
                end = fleet[number].compute(when)
                seen.took_s.append(end - came)
                heapq.heappush(coming, (end, False, number, came))
            else:
                fleet[number].busy -= 1
                in_flight -= 1

    while now < seconds:
        now += chance.expovariate(rate)
        until(now)
        while events and events[-1][0] <= now:
            _, changed, here = events.pop()
            fleet[changed].up = here
            if not here:
                fleet[changed].forget()
        model = bisect.bisect(shares, chance.random())
        up = [n for n, server in enumerate(fleet) if server.up]
        most = math.ceil(FACTOR * (in_flight + 1) / len(up)) if policy == "bounded" else math.inf
        if policy == "random":
            number = chance.choice(up)
        else:
            number = next(n for n in orders[model] if fleet[n].up and fleet[n].busy < most)
        fleet[number].busy += 1
        in_flight += 1
        heapq.heappush(coming, (fleet[number].take(model, now, seen), True, number, now))
    until(math.inf)
    return seen


def _events(servers: int, seconds: float) -> Iterator[tuple[float, int, bool]]:
    """When a server goes or comes: one of sixteen fails half way; then each is replaced."""
    for number in range(0, servers, 16):
        yield 0.5 * seconds, number, False
        yield 0.6 * seconds, number, True
    each_s = 0.3 * seconds / servers
    for number in range(servers):
        yield 0.65 * seconds + number * each_s, number, False
        yield 0.65 * seconds + (number + 1) * each_s, number, True


def percentile(share: float, values: list[float]) -> float:
    return sorted(values)[int(share * len(values))]


def compared(seed: int) -> Iterator[list[str]]:
    for servers, rate in ((16, 300.0), (64, 1200.0), (256, 4800.0)):
        for policy in ("hash", "bounded", "random"):
            seen = simulate(policy, FINE_TUNES, servers, rate, SECONDS, seed)
            count, late_s = len(seen.took_s), percentile(0.99, seen.took_s)
            yield [
                f"{servers}",
                f"{rate:,.0f}",
                policy,
                f"{seen.hits / count:.2f}",
                f"{late_s:.1f} s" if late_s < SECONDS / 4 else "overload",
                f"{seen.bytes / count / 1e6:,.1f} MB",
                f"${servers * DOLLARS:.2f}",
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    head = ("servers", "requests a second", "by", "loaded", "p99", "from S3 a request", "an hour")
    print("\n".join(table(head, list(compared(seed)))))


if __name__ == "__main__":
    main()
