"""One, two and three servers behind HAProxy, and what the proxy costs.

Each server has one core, or as many as `--cpus`.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import random_model
from benchmarks.fleet.haproxy import HAProxy
from benchmarks.report.goals import Goal, Results
from benchmarks.report.tables import page, shown, table
from benchmarks.run import Run
from benchmarks.server import Server, ask
from benchmarks.switching.control_group import ControlGroup
from engine.artifacts.config import GPT2Config

NODES, WARM_UP, CLIENTS = (1, 2, 3), 50, 8
NAMES = [f"모델{number}" for number in range(12)]


@dataclass(frozen=True)
class Plan:
    config: GPT2Config = random_model.FULL
    calls: int = 1000
    seconds: float = 20.0
    new_tokens: int = 32
    rounds: int = 3
    cpus: float | None = None  # of a server; without it, a core of its own


def added_ms(results: Results) -> list[float]:
    """What the proxy adds: the median over the pairs of the difference within each."""
    pairs = zip(results["proxy"]["through_ms"], results["proxy"]["direct_ms"], strict=True)
    return [statistics.median(through - direct for through, direct in pairs)]


def gained(many: int) -> Callable[[Results], list[float]]:
    """Tokens a second of so many servers against one."""

    def ratios(results: Results) -> list[float]:
        nodes = results["nodes"]
        pairs = zip(nodes[str(many)]["tokens_per_s"], nodes["1"]["tokens_per_s"], strict=True)
        return [several / one for several, one in pairs]

    return ratios


class FleetRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 30, 1.0, 4, 1)
    PARTS = DEFAULT = ("proxy", "nodes")
    GOALS: Sequence[Goal] = (
        ("tokens a second of two servers against one", ">=", 1.8, "x", gained(2)),
        ("tokens a second of three servers against one", ">=", 2.7, "x", gained(3)),
        ("what the proxy adds to a call, median", "<=", 1, "ms", added_ms),
    )

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        super().__init__(plan, wanted, workdir)
        self.store = workdir / "models"

    def measure(self, save: Callable[[], object]) -> None:
        self.model = random_model.make(self.store, self.plan.config, 0)
        self.tiny = random_model.make(self.store, random_model.TINY, 0)
        self.text = random_model.text_of(random_model.prompts(random_model.TINY, 1, 16)[0])
        self.measure_parts({"proxy": self._proxy, "nodes": self._nodes}, save)

    def _proxy(self) -> Results:
        log = self.log("proxy")
        with (
            Server(self.store, log, {NAMES[0]: self.tiny}) as server,
            self._proxy_of([server]) as proxy,
        ):
            ways = {"direct_ms": server.connect(), "through_ms": server.connect()}
            ways["through_ms"].port = proxy.port
            measured: dict[str, list[float]] = {name: [] for name in ways}
            for call in range(WARM_UP + self.plan.calls):
                for name, connection in ways.items():
                    seconds, _ = ask(connection, "%EB%AA%A8%EB%8D%B80", self.text, 1)
                    if call >= WARM_UP:
                        measured[name].append(1000 * seconds)
            return measured

    def _proxy_of(self, servers: Sequence[Server]) -> HAProxy:
        return HAProxy(self.logs, [f"127.0.0.1:{server.port}" for server in servers])

    def _nodes(self) -> Results:
        cores, each = len(os.sched_getaffinity(0)), self.plan.cpus or 1
        measured: Results = {}
        for nodes in NODES:
            if cores < nodes * each:
                self.results["skipped"][f"{nodes} servers"] = f"here are {cores} cores"
                continue
            measured[str(nodes)] = self._several(nodes)
            measured[str(nodes)]["alone"] = cores > nodes * each  # on what they have
        return measured

    def _several(self, nodes: int) -> Results:
        plan, cores = self.plan, sorted(os.sched_getaffinity(0))
        with contextlib.ExitStack() as started:
            servers = []
            for number in range(nodes):
                prefix = ["taskset", "-c", str(cores[number % len(cores)])]
                if plan.cpus:
                    prefix = started.enter_context(ControlGroup(cpus=plan.cpus, seen=True)).prefix
                models, log = dict.fromkeys(NAMES, self.model), self.log(f"{nodes}-{number}")
                server = Server(self.store, log, models, prefix=prefix)
                servers.append(started.enter_context(server))
            proxy = started.enter_context(self._proxy_of(servers))
            rounds = [self._round(servers[0], proxy, nodes, r) for r in range(plan.rounds)]
        return {
            "tokens_per_s": [
                sum(len(c) for c in r) * plan.new_tokens / plan.seconds for r in rounds
            ],
            "p99_ms": [1000 * _p99([s for c in r for s in c]) for r in rounds],
        }

    def _round(self, server: Server, proxy: HAProxy, nodes: int, turn: int) -> list[list[float]]:
        """The seconds of each client's calls."""
        end = time.perf_counter() + self.plan.seconds

        def client(number: int) -> list[float]:
            chance, seconds = random.Random(1000 * turn + number), []  # noqa: S311
            connection = server.connect()
            connection.port = proxy.port
            with contextlib.closing(connection):
                while time.perf_counter() < end:
                    name = f"%EB%AA%A8%EB%8D%B8{chance.randrange(len(NAMES))}"
                    seconds.append(ask(connection, name, self.text, self.plan.new_tokens)[0])
            return seconds

        with ThreadPoolExecutor(CLIENTS * nodes) as pool:
            return list(pool.map(client, range(CLIENTS * nodes)))

    def lines(self) -> str:
        return lines(self.results)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def lines(results: Results) -> str:
    plan = results["plan"]
    caption = (
        f"{CLIENTS} clients a server, {plan['new_tokens']} tokens, {plan['seconds']:g} s a round"
    )
    return page(results, caption, _proxy_table(results), _nodes_table(results))


def _proxy_table(results: Results) -> Iterator[str]:
    rows = [
        (name, shown(results["proxy"][key], 2))
        for name, key in (("directly", "direct_ms"), ("through the proxy", "through_ms"))
        if "proxy" in results
    ]
    yield from table(("one token of a tiny model", "ms"), rows)


def _nodes_table(results: Results) -> Iterator[str]:
    rows = [
        (
            nodes if measured["alone"] else f"{nodes}, with the proxy and the clients",
            shown(measured["tokens_per_s"], 0),
            shown(measured["p99_ms"], 0),
        )
        for nodes, measured in results.get("nodes", {}).items()
    ]
    servers = f"servers of {results['plan'].get('cpus') or 1:g} cores"
    yield from table((servers, "tokens a second", "p99, ms"), rows)
