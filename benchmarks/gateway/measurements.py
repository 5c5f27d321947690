"""Measured: what stands in front of the engine.

The start, a call's way through the gateway, models that are not loaded yet or not even here, and
whether loading and unloading leaves memory behind.
"""

from __future__ import annotations

import dataclasses
import http.client
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import random_model
from benchmarks.engine.process import measure_cycles
from benchmarks.gateway import fetching, streams
from benchmarks.report.goals import Goal, Results
from benchmarks.report.tables import Row, medians, page, shown, table
from benchmarks.run import Run
from benchmarks.server import Server, ask, call
from engine.artifacts.config import GPT2Config
from engine.http.client import UnixConnection

BACKENDS = {"mxnet": ("mxnet", "int8"), "native": ("native", "int8")}
WARM_UP = 200  # calls until Java has compiled its part


@dataclass(frozen=True)
class Plan:
    config: GPT2Config = random_model.FULL
    archived_layers: int = 4  # in fp16, about 130 MB as a .tar.gz
    starts: int = 5
    calls: int = 2000
    streams: int = 100
    cold_calls: int = 10
    fetches: int = 3
    cycles: int = 100


def added_ms(results: Results) -> list[float]:
    """What the gateway adds: the median over the pairs of the difference within each."""
    calls = results["calls"]
    pairs = zip(calls["gateway_ms"], calls["mms_ms"], strict=True)
    return [statistics.median(gateway - mms for gateway, mms in pairs)]


def growth_percent(results: Results) -> list[float]:
    before, after = (results["cycles"][when]["rss_bytes"] for when in ("before", "after"))
    return [100 * (after / before - 1)]


GOALS: tuple[Goal, ...] = (
    ("what the gateway adds to a call, median", "<=", 1, "ms", added_ms),
    *streams.GOALS,
    ("start to ready, native", "<=", 4, "s", lambda r: list(r["starts"]["native"])),
    ("start to ready, mxnet", "<=", 4, "s", lambda r: list(r["starts"]["mxnet"])),
    ("first token of a full-size model on disk", "<=", 1, "s", lambda r: list(r["cold"]["full"])),
    ("first token of a tiny model on disk", "<=", 0.5, "s", lambda r: list(r["cold"]["tiny"])),
    ("fetching and unpacking, against cp and tar", "<=", 1.2, "x", fetching.slower),
    ("growth of RSS by loading and unloading", "<=", 5, "%", growth_percent),
)


class GatewayRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 1, 1, 50, 3, 2, 1, 5)
    DEFAULT = ("starts", "calls", "streams", "cold", "fetching", "cycles")
    PARTS = DEFAULT
    GOALS = GOALS

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        super().__init__(plan, wanted, workdir)
        self.store = workdir / "models"

    def measure(self, save: Callable[[], object]) -> None:
        self.full = random_model.make(self.store, self.plan.config, 0)
        self.tiny = random_model.make(self.store, random_model.TINY, 0)
        # The tiny model's pieces are the full-size one's, too.
        self.text = random_model.text_of(random_model.prompts(random_model.TINY, 1, 16)[0])
        self.models = {"full": self.full, "tiny": self.tiny}
        cycles, log = self.plan.cycles, self.log("cycles")
        parts: dict[str, Callable[[], Results]] = {
            "starts": self._starts,
            "calls": self._calls,
            "streams": self._streams,
            "cold": self._cold,
            "fetching": self._fetching,
            "cycles": lambda: measure_cycles(self.full, self.text, cycles, log),
        }
        self.measure_parts(parts, save)

    def _starts(self) -> Results:
        """Seconds from `serve` to ready, by backend, in turns."""
        measured: Results = {name: [] for name in BACKENDS}
        for _ in range(self.plan.starts):
            for name, backend in BACKENDS.items():
                with Server(self.store, self.log("starts"), backend=backend) as server:
                    measured[name].append(server.ready_s)
        return measured

    def _calls(self) -> Results:
        """Milliseconds of one small call, to the gateway's port and to MMS's own socket in turns.

        Calls of a pair follow each other. Each side has one connection, which stays open.
        """
        measured: Results = {"gateway_ms": [], "mms_ms": []}
        body = {"inputs": self.text, "parameters": {"max_new_tokens": 1}}
        with Server(self.store, self.log("calls"), {"m": self.tiny}) as server:
            ways: dict[str, tuple[http.client.HTTPConnection, str]] = {
                "gateway_ms": (server.connect(), "m"),
                "mms_ms": (UnixConnection(server.run_dir / "mms.sock"), server.id_of("m")),
            }
            for _ in range(WARM_UP + self.plan.calls):
                for name, (connection, model) in ways.items():
                    seconds, _ = call(connection, f"/models/{model}/invoke", body)
                    measured[name].append(1000 * seconds)
            for connection, _ in ways.values():
                connection.close()
        return {name: each[WARM_UP:] for name, each in measured.items()}

    def _streams(self) -> Results:
        return streams.measure(
            self.store, self.models, self.text, self.plan.streams, self.log("streams")
        )

    def _cold(self) -> Results:
        """Seconds of a call, for one token, of a model that is on disk, prepared, not loaded."""
        measured: Results = {}
        with Server(self.store, self.log("cold")) as server:
            connection = server.connect()
            for name, folder in self.models.items():
                measured[name] = []
                ask(connection, folder.name, self.text, 1)  # the very first load quantizes
                for _ in range(self.plan.cold_calls):
                    server.unload(folder.name)
                    measured[name].append(ask(connection, folder.name, self.text, 1)[0])
            connection.close()
        return measured

    def _fetching(self) -> Results:
        config = dataclasses.replace(self.plan.config, num_layers=self.plan.archived_layers)
        folder = random_model.make(self.store, config, 200, "float16")
        archive = fetching.pack(folder, self.workdir / f"{folder.name}.tar.gz")
        return fetching.measure(archive, self.plan.fetches, self.workdir, self.log("fetching"))

    def lines(self) -> str:
        return lines(self.results)


def lines(results: Results) -> str:
    return page(results, "the gateway", table(("", ""), [*rows(results)]))


def rows(results: Results) -> Iterator[Row]:
    if measured := results.get("calls"):
        for name, key in (("the gateway", "gateway_ms"), ("MMS's own socket", "mms_ms")):
            p99 = statistics.quantiles(measured[key], n=100)[98]
            cell = f"{statistics.median(measured[key]):.2f} (p99 {p99:.2f})"
            yield f"a small call to {name}, ms", cell
    yield from streams.rows(results.get("streams", {}))
    if measured := results.get("fetching"):
        way, size = measured["their_way"], f"{measured['bytes'] / 1e6:.0f} MB"
        ours, theirs = ([e["seconds"] for e in measured[key]] for key in ("ours", "theirs"))
        yield f"{size} from S3, unpacked, by the server: s", shown(ours, 2)
        yield f"the same by {way} and tar: s", shown(theirs, 2)
        parts = medians(measured["theirs"])
        cell = f"{parts['download_s']:.2f} and {parts['unpack_s']:.2f}"
        yield f"of that, {way} and tar: s", cell
    if measured := results.get("cycles"):
        sizes = (f"{measured[when]['rss_bytes'] / 1e6:.0f}" for when in ("before", "after"))
        loads = f"{measured['cycles']} loads and unloads, MB"
        yield f"RSS of the engine before and after {loads}", " and ".join(sizes)
