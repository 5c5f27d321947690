"""Measured: what stands in front of the engine.

The start, a call's way through the gateway, models that are not loaded yet or not even here, and
whether loading and unloading leaves memory behind.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from benchmarks import random_model
from benchmarks.engine import process as engine_process
from benchmarks.gateway import fetching, streams
from benchmarks.http_server import HTTPServer, UnixConnection
from benchmarks.process import BenchmarkError
from benchmarks.report import machine, tables
from benchmarks.report.goals import Goal, goals
from common.errors import EngineError
from engine.artifacts.config import GPT2Config

PARTS = ("starts", "calls", "streams", "cold", "fetching", "cycles")
BACKENDS = {"onnxruntime": ("onnxruntime", "int8"), "mxnet": ("mxnet", "fp32")}
WARM_UP = 200  # calls until Java has compiled its part

Results = dict[str, Any]


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

    @classmethod
    def quick(cls) -> Plan:
        """Some seconds on tiny models: shows that everything runs, not how fast."""
        return cls(random_model.TINY, 1, 1, 50, 3, 2, 1, 5)


def measure(plan: Plan, wanted: tuple[str, ...], workdir: Path) -> Results:
    """What `wanted` names. What cannot be measured is in `results["skipped"]`, and why."""
    logs, models = workdir / "logs", workdir / "models"
    logs.mkdir(parents=True, exist_ok=True)
    full = random_model.make(models, plan.config, 0)
    tiny = random_model.make(models, random_model.TINY, 0)
    # The tiny model's pieces are the full-size one's, too.
    text = random_model.text_of(random_model.prompts(random_model.TINY, 1, 16)[0])
    results: Results = {
        "machine": machine.describe(),
        "plan": asdict(plan),
        "wanted": list(wanted),
        "skipped": {},
    }

    def archived() -> Path:
        config = dataclasses.replace(plan.config, num_layers=plan.archived_layers)
        folder = random_model.make(models, config, 200, "float16")
        return fetching.pack(folder, workdir / f"{folder.name}.tar.gz")

    parts: dict[str, Callable[[], Any]] = {
        "starts": lambda: measure_starts(tiny, plan.starts, logs / "starts.log"),
        "calls": lambda: measure_calls(tiny, text, plan.calls, logs / "calls.log"),
        "streams": lambda: streams.measure(
            {"tiny": tiny, "full": full}, text, plan.streams, logs / "streams.log"
        ),
        "cold": lambda: measure_cold(
            {"full": full, "tiny": tiny}, text, plan.cold_calls, logs / "cold.log"
        ),
        "fetching": lambda: fetching.measure(
            archived(), plan.fetches, workdir, logs / "fetching.log"
        ),
        "cycles": lambda: engine_process.measure_cycles(
            full, text, plan.cycles, logs / "cycles.log"
        ),
    }
    for name in tqdm([n for n in PARTS if n in wanted], desc="measuring", disable=None):
        try:
            results[name] = parts[name]()
        except (BenchmarkError, EngineError, OSError, requests.RequestException) as error:
            results["skipped"][name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
    results["goals"] = list(goals(results, GOALS))
    return results


def measure_starts(folder: Path, tries: int, log: Path) -> dict[str, list[float]]:
    """Seconds from `serve` to ready, by backend, in turns."""
    found: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for _ in range(tries):
        for name, backend in BACKENDS.items():
            server = HTTPServer({}, log, backend, store=folder.parent)
            found[name].append(server.ready_s)
            server.close()
    return found


def measure_calls(folder: Path, text: str, count: int, log: Path) -> dict[str, list[float]]:
    """Milliseconds of one and the same small call, to the gateway's port and to MMS's own socket
    in turns: pairs of neighbours in time. Each has one connection, which stays open."""
    server = HTTPServer({"m": folder}, log)
    try:
        (row,) = json.loads((server.run_dir / "models.json").read_text(encoding="utf-8"))
        body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": 1}}).encode()
        ways = {
            "gateway_ms": (
                http.client.HTTPConnection("127.0.0.1", server.port),
                "/models/m/invoke",
            ),
            "mms_ms": (
                UnixConnection(server.run_dir / "mms.sock"),
                f"/models/{row['id']}/invoke",
            ),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(WARM_UP + count):
            for name, (connection, url) in ways.items():
                seconds = _call(connection, url, body)
                if i >= WARM_UP:
                    found[name].append(1000 * seconds)
        for connection, _ in ways.values():
            connection.close()
        return found
    finally:
        server.close()


def measure_cold(
    folders: dict[str, Path], text: str, count: int, log: Path
) -> dict[str, list[float]]:
    """Seconds of a call, for one token, of a model that is on disk, prepared, and not loaded."""
    server = HTTPServer({}, log, store=next(iter(folders.values())).parent)
    found: dict[str, list[float]] = {name: [] for name in folders}
    try:
        with requests.Session() as session:
            for name, folder in folders.items():
                server.ask(session, folder.name, text, 1)  # the very first load quantizes
                for _ in range(count):
                    server.unload(folder.name)
                    began = time.perf_counter()
                    server.ask(session, folder.name, text, 1)
                    found[name].append(time.perf_counter() - began)
        return found
    finally:
        server.close()


def _call(connection: http.client.HTTPConnection, url: str, body: bytes) -> float:
    began = time.perf_counter()
    connection.request("POST", url, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    seconds = time.perf_counter() - began
    if answer.status != 200:
        raise BenchmarkError(f"{url} answered {answer.status}: {content[:200]!r}")
    return seconds


# What is made of it


def added_ms(results: Results) -> list[float]:
    """What the gateway adds: the median over the pairs of the difference within each."""
    calls = results["calls"]
    pairs = zip(calls["gateway_ms"], calls["mms_ms"], strict=True)
    return [statistics.median(gateway - mms for gateway, mms in pairs)]


def growth_percent(results: Results) -> list[float]:
    before, after = (results["cycles"][when]["rss_bytes"] for when in ("before", "after"))
    return [100 * (after / before - 1)]


def _slower(results: Results) -> list[float]:
    found = results["fetching"]
    pairs = zip(found["ours"], found["theirs"], strict=True)
    return [ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]


GOALS: tuple[Goal, ...] = (
    ("what the gateway adds to a call, median", "<=", 1, "ms", added_ms),
    (
        "first bytes of a full-size model's stream after the engine's, median",
        "<=",
        3,
        "ms",
        lambda r: streams.over(r, "full", "own", "engine"),
    ),
    (
        "OpenAI's route over our own, first bytes, median",
        "<=",
        0.5,
        "ms",
        lambda r: streams.over(r, "tiny", "openai", "own"),
    ),
    (
        f"OpenAI's route over our own, a stream of {streams.TOKENS} tokens, median",
        "<=",
        0.5,
        "ms",
        lambda r: streams.over(r, "tiny", "openai", "own", "whole_ms"),
    ),
    ("start to ready, onnxruntime", "<=", 4, "s", lambda r: list(r["starts"]["onnxruntime"])),
    ("start to ready, mxnet", "<=", 4, "s", lambda r: list(r["starts"]["mxnet"])),
    ("first token of a full-size model on disk", "<=", 1, "s", lambda r: list(r["cold"]["full"])),
    ("first token of a tiny model on disk", "<=", 0.5, "s", lambda r: list(r["cold"]["tiny"])),
    ("fetching and unpacking, against cp and tar", "<=", 1.2, "x", _slower),
    ("growth of RSS by loading and unloading", "<=", 5, "%", growth_percent),
)


def lines(results: Results) -> Iterator[str]:
    """The results as Markdown."""
    yield from machine.lines(results["machine"])
    yield ""
    yield from ("| | |", "|---|---|")
    if "calls" in results:
        for name, key in (("the gateway", "gateway_ms"), ("MMS's own socket", "mms_ms")):
            yield f"| a small call to {name}, ms | {_quantiles(results['calls'][key])} |"
    if "streams" in results:
        yield from streams.lines(results["streams"])
    if "fetching" in results:
        found = results["fetching"]
        size = f"{found['bytes'] / 1e6:.0f} MB"
        for label, key in (
            (f"{size} from S3, unpacked, by the server: s", "ours"),
            (f"the same by {found['their_way']} and tar: s", "theirs"),
        ):
            yield f"| {label} | {tables.shown([e['seconds'] for e in found[key]], 2)} |"
        parts = {k: statistics.median(e[k] for e in found["theirs"]) for k in found["theirs"][0]}
        yield (
            f"| of that, {found['their_way']} and tar: s"
            f" | {parts['download_s']:.2f} and {parts['unpack_s']:.2f} |"
        )
    if "cycles" in results:
        found = results["cycles"]
        before, after = (found[when]["rss_bytes"] / 1e6 for when in ("before", "after"))
        yield (
            f"| RSS of the engine before and after {found['cycles']} loads and unloads, MB"
            f" | {before:.0f} and {after:.0f} |"
        )
    yield ""
    yield from tables.goal_lines(results)
    for name, reason in results["skipped"].items():
        yield f"\nnot measured: {name} ({reason})"


def _quantiles(values: list[float]) -> str:
    cuts = statistics.quantiles(values, n=100)
    return f"{statistics.median(values):.2f} (p99 {cuts[98]:.2f})"
