"""What hashing by model is worth to a fleet of many servers and ten thousand fine-tunes.

    python -m benchmarks.fleet.simulation          a minute or two
    python -m benchmarks.fleet.simulation --seed 2

Requests come at random times, for models by Zipf's law. A server works on as many at once as it has
slots, and keeps so many models in memory and on its disk; the least recently used go; what is not
in memory is loaded, what is not on the disk is fetched from S3 and prepared first, and others wait
for the same load. Everything begins as it is after hours. A proxy chooses the server: by consistent
hashing (`hash`), the same with bounded load (`bounded`, as deploy/haproxy says it), or at random.
In the middle one server of 16 fails, and others have its share until it is back with nothing; then
all are replaced, one by one.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.report.tables import table

FINE_TUNES = 10_000
# Of two cores and 8 GiB (docs/develop/benchmark.md): int8, eight rows that share steps make 561
# tokens a second, and an answer has 16; models in memory, on the disk.
SLOTS, ANSWER_S, ROOM, DISK = 8, 16 * 8 / 561, 36, 400
LOAD_S, FETCH_S, FETCH_BYTES = 0.3, 4.0, 250_000_000
DOLLARS = 0.115  # ml.m5.large in scripts/aws/instances.json
SECONDS = 30.0
PLACES = 64
FACTOR = 1.5  # haproxy's hash-balance-factor
# Servers, how large each is in the above, requests a second.
FLEETS = ((16, 1, 300.0), (64, 1, 1_200.0), (256, 1, 4_800.0), (16, 8, 2_400.0), (256, 8, 50_000.0))


@dataclass
class Server:
    """`size` is in two cores and 8 GiB. hot, cold: models in memory and on the disk, the least
    recently used first; free: when each slot is; loading: until when a model is loaded"""

    number: int
    size: int
    up: bool = True
    hot: OrderedDict[int, None] = field(default_factory=OrderedDict)
    cold: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free: list[float] = field(default_factory=list)
    loading: dict[int, float] = field(default_factory=dict)
    busy: int = 0

    def __post_init__(self) -> None:
        self.free = [0.0] * (SLOTS * self.size)

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
        _keep(self.hot, model, ROOM * self.size)
        _keep(self.cold, model, DISK * self.size)
        self.loading[model] = now + took_s
        return now + took_s

    def compute(self, now: float) -> float:
        """When an answer to a model that is there is made."""
        end = max(self.free[0], now) + ANSWER_S
        heapq.heapreplace(self.free, end)
        return end


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
        self._all = range(servers)

    def order(self, key: int) -> list[int]:
        """Servers from the key's place on: the first few of them, and then all."""
        at = bisect.bisect(self._hashes, key)
        near = dict.fromkeys([*self._servers[at : at + PLACES], *self._servers[:PLACES]][:PLACES])
        return [*near, *(server for server in self._all if server not in near)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def arrivals(
    fine_tunes: int, rate: float, seconds: float, seed: int
) -> Iterator[tuple[float, int, float]]:
    """When each request comes, for which model (0 is the most popular), and a chance in [0, 1)."""
    chance = np.random.default_rng(seed)
    count = chance.poisson(rate * seconds)
    shares = np.cumsum(1 / np.arange(1, fine_tunes + 1))
    models = np.searchsorted(shares, chance.random(count) * shares[-1], side="right")
    times = np.sort(chance.random(count)) * seconds
    return zip(times.tolist(), models.tolist(), chance.random(count).tolist(), strict=True)


def settled(policy: str, fleet: list[Server], orders: Sequence[Sequence[int]]) -> None:
    """Gives each the most popular of the models that it is asked for."""
    for model, order in enumerate(orders):
        for server in fleet if policy == "random" else [fleet[order[0]]]:
            for models, most in ((server.hot, ROOM), (server.cold, DISK)):
                if len(models) < most * server.size:
                    models[model] = None
                    models.move_to_end(model, last=False)


def simulate(
    policy: str,
    fine_tunes: int,
    servers: int,
    rate: float,
    seconds: float,
    seed: int,
    size: int = 1,
) -> Seen:
    """`rate` in requests a second."""
    ring, fleet = Ring(servers), [Server(number, size) for number in range(servers)]
    orders = [ring.order(_hash(f"model-{model}")) for model in range(fine_tunes)]
    settled(policy, fleet, orders)
    events = sorted(_events(servers, seconds), reverse=True)
    seen, in_flight, up = Seen(), 0, fleet
    # When, whether its model is there only now, of which server, and when it came.
    coming: list[tuple[float, bool, int, float]] = []

    def until(now: float) -> None:
        nonlocal in_flight
        while coming and coming[0][0] <= now:
            when, begins, number, came = coming[0]
            if begins:
                end = fleet[number].compute(when)
                seen.took_s.append(end - came)
                heapq.heapreplace(coming, (end, False, number, came))
            else:
                heapq.heappop(coming)
                fleet[number].busy -= 1
                in_flight -= 1

    for now, model, chance in arrivals(fine_tunes, rate, seconds, seed):
        until(now)
        while events and events[-1][0] <= now:
            _, changed, here = events.pop()
            fleet[changed].up = here
            if not here:
                fleet[changed].forget()
            up = [server for server in fleet if server.up]
        most = math.ceil(FACTOR * (in_flight + 1) / len(up)) if policy == "bounded" else math.inf
        if policy == "random":
            server = up[int(chance * len(up))]
        else:
            found = (fleet[number] for number in orders[model])
            server = next(one for one in found if one.up and one.busy < most)
        server.busy += 1
        in_flight += 1
        heapq.heappush(coming, (server.take(model, now, seen), True, server.number, now))
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
    for servers, size, rate in FLEETS:
        for policy in ("hash", "bounded", "random"):
            seen = simulate(policy, FINE_TUNES, servers, rate, SECONDS, seed, size)
            count, late_s = len(seen.took_s), percentile(0.99, seen.took_s)
            yield [
                f"{servers}",
                f"{2 * size}",
                f"{rate:,.0f}",
                policy,
                f"{seen.hits / count:.2f}",
                f"{late_s:.1f} s" if late_s < SECONDS / 4 else "overload",
                f"{seen.bytes / count / 1e6:,.1f} MB",
                f"${servers * size * DOLLARS:.2f}",
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    head = (
        "servers",
        "cores",
        "requests a second",
        "by",
        "loaded",
        "p99",
        "from S3 a request",
        "an hour",
    )
    print("\n".join(table(head, list(compared(seed)))))


if __name__ == "__main__":
    main()
