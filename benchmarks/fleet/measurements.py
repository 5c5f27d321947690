"""Measures one, two and three servers behind HAProxy, and the overhead of the proxy.

Each server has one core, or as many as `--cpus`.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.report import tables as report
from benchmarks.report.tables import Goal, Results, Row, Values, added, in_ms, ratios, shown
from benchmarks.run import Run, in_turns
from benchmarks.worker import at_once
from engine.artifacts.config import GPT2Config
from testbed import random_model
from testbed.control_group import ControlGroup
from testbed.haproxy import HAProxy
from testbed.server import Server, ask

CLIENTS = 8  # for each server

Connect = Callable[[], http.client.HTTPConnection]


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement of a fleet.

    models: number of names under which the model is loaded
    nodes: number of servers of each fleet
    cpus: cores of a server; by default it is pinned to one
    """

    config: GPT2Config = random_model.FULL
    calls: int = 1000
    warm_up: int = 50
    seconds: float = 20.0
    new_tokens: int = 32
    rounds: int = 3
    models: int = 12
    nodes: tuple[int, ...] = (1, 2, 3)
    cpus: float | None = None

    @property
    def names(self) -> list[str]:
        return [f"모델{number}" for number in range(self.models)]


def _gained(many: int) -> Values:
    """Return a goal's values: tokens a second of `many` servers over those of one."""
    return lambda r: ratios(*(r["nodes"][nodes]["tokens_per_s"] for nodes in (str(many), "1")))


def lines(results: Results) -> str:
    plan, nodes = results["plan"], results.get("nodes", {})
    caption = (
        f"{CLIENTS} clients a server, {plan['new_tokens']} tokens, {plan['seconds']:g} s a round"
    )
    ways = (("directly", "direct_ms"), ("through the proxy", "through_ms"))
    proxy = [(name, shown(results["proxy"][key], 2)) for name, key in ways if "proxy" in results]
    servers = f"servers of {plan.get('cpus') or 1:g} cores"
    tables = [
        (("one token of a tiny model", "ms"), proxy),
        ((servers, "tokens a second", "p99, ms"), _nodes(nodes)),
    ]
    return report.page(results, caption, tables)


def _nodes(measured: Results) -> Iterator[Row]:
    for nodes, each in measured.items():
        name = nodes if each["alone"] else f"{nodes}, with the proxy and the clients"
        yield name, shown(each["tokens_per_s"], 0), shown(each["p99_ms"], 0)


class FleetRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 10, 2, 0.2, 4, 1, 2, (2, 3))
    PARTS = DEFAULT = ("proxy", "nodes")
    GOALS: Sequence[Goal] = (
        ("tokens a second of two servers against one", ">=", 1.8, "x", _gained(2)),
        ("tokens a second of three servers against one", ">=", 2.7, "x", _gained(3)),
        ("what the proxy adds to a call, median", "<=", 1, "ms",
         lambda r: added(r["proxy"], "through_ms", "direct_ms")),
    )  # fmt: skip
    LINES = lines

    def prepare(self) -> None:
        self.model = random_model.make(self.store, self.plan.config, 0)

    def proxy(self) -> Results:
        """Measure milliseconds of a call to a server directly and through the proxy, in turns."""
        plan, name = self.plan, self.plan.names[0]
        with (
            Server(self.store, self.log("proxy"), {name: self.tiny}) as server,
            self._proxy_of([server]) as proxy,
        ):
            ports = {"direct_ms": server.port, "through_ms": proxy.port}
            ways = {
                way: partial(ask, server.connect(port), name, self.text, 1)
                for way, port in ports.items()
            }
            measured = in_turns(ways, plan.calls, plan.warm_up)
        return {way: in_ms(seconds for seconds, _ in each) for way, each in measured.items()}

    def _proxy_of(self, servers: Sequence[Server]) -> HAProxy:
        return HAProxy(self.logs, [f"127.0.0.1:{server.port}" for server in servers])

    def nodes(self) -> Results:
        cores, each = len(os.sched_getaffinity(0)), self.plan.cpus or 1
        measured: Results = {}
        for nodes in self.plan.nodes:
            if cores < nodes * each:
                self.results["skipped"][f"{nodes} servers"] = f"here are {cores} cores"
                continue
            alone = cores > nodes * each  # a core is left for the proxy and the clients
            measured[str(nodes)] = {**self._several(nodes), "alone": alone}
        return measured

    def _several(self, nodes: int) -> Results:
        plan, cores = self.plan, sorted(os.sched_getaffinity(0))
        with contextlib.ExitStack() as started:
            servers = []
            for number in range(nodes):
                prefix = ["taskset", "-c", str(cores[number % len(cores)])]
                if plan.cpus:
                    prefix = started.enter_context(ControlGroup(cpus=plan.cpus, seen=True)).prefix
                models, log = dict.fromkeys(plan.names, self.model), self.log(f"{nodes}-{number}")
                server = Server(self.store, log, models, prefix=prefix)
                servers.append(started.enter_context(server))
            proxy = started.enter_context(self._proxy_of(servers))
            connect = partial(servers[0].connect, proxy.port)
            rounds = [self._round(connect, nodes, r) for r in range(plan.rounds)]
        return {
            "tokens_per_s": [len(calls) * plan.new_tokens / took_s for calls, took_s in rounds],
            "p99_ms": [1000 * report.quantiles(calls)["p99"] for calls, _ in rounds],
        }

    def _round(self, connect: Connect, nodes: int, turn: int) -> tuple[list[float], float]:
        """Start calls for `plan.seconds`; return the seconds of each call, and until the last."""
        end = time.perf_counter() + self.plan.seconds

        def client(number: int) -> list[float]:
            chance, seconds = random.Random(1000 * turn + number), []  # noqa: S311
            with contextlib.closing(connect()) as connection:
                while time.perf_counter() < end:
                    name = chance.choice(self.plan.names)
                    seconds.append(ask(connection, name, self.text, self.plan.new_tokens)[0])
            return seconds

        count = CLIENTS * nodes
        calls, seconds = at_once(count, client, range(count))
        return [*itertools.chain(*calls)], seconds
