"""Measures the server in front of the engine, `kogpt2 bench --gateway`.

Its parts are the start, calls and streams through the gateway, models that are not loaded or not
fetched yet, and the growth of memory by loading and unloading, and by a batch of lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from benchmarks.engine.loading import measure_cycles
from benchmarks.gateway import batch, fetching
from benchmarks.report import tables as report
from benchmarks.report.tables import Goal, Results, Row, Table, added, in_ms, mb, ratios, shown
from benchmarks.run import Run, in_turns
from engine.artifacts.config import GPT2Config
from engine.http.client import UnixConnection
from testbed import random_model
from testbed.process import ProgramError, free_port
from testbed.server import HEADERS, Server, ask, call

BACKENDS = {"mxnet": ("mxnet", "int8"), "native": ("native", "int8")}
TOKENS = 32  # of a stream
STREAM_WARM_UP = 10

# Sends a request; returns the seconds until its first and until its last bytes.
Way = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement of the gateway.

    archived_layers: layers of the model to fetch; in fp16, about 130 MB as a .tar.gz
    warm_up: calls until Java has compiled its part
    settling: loads until the engine has its libraries, threads and their heaps
    lines: lines of a batch
    """

    config: GPT2Config = random_model.FULL
    archived_layers: int = 4
    starts: int = 5
    calls: int = 2000
    streams: int = 100
    cold_calls: int = 10
    fetches: int = 3
    cycles: int = 100
    warm_up: int = 200
    settling: int = 10
    lines: int = 20_000


def _slower(results: Results) -> list[float]:
    measured = results["fetching"]
    return ratios(*([e["seconds"] for e in measured[way]] for way in ("ours", "theirs")))


def _growth_percent(results: Results) -> list[float]:
    before, after = (results["cycles"][when]["rss_bytes"] for when in ("before", "after"))
    return [100 * (after / before - 1)]


def _over(results: Results, size: str, way: str, other: str, key: str = "first_ms") -> list[float]:
    """Return the median extra milliseconds of a stream by `way` over one by `other`."""
    times = {name: ways[key] for name, ways in results["streams"][size].items()}
    return added(times, way, other)


GOALS: tuple[Goal, ...] = (
    ("what the gateway adds to a call, median", "<=", 1, "ms",
     lambda r: added(r["calls"], "gateway_ms", "mms_ms")),
    ("first bytes of a full-size model's stream after the engine's, median", "<=", 3, "ms",
     lambda r: _over(r, "full", "own", "engine")),
    ("OpenAI's route over our own, first bytes, median", "<=", 0.5, "ms",
     lambda r: _over(r, "tiny", "openai", "own")),
    (f"OpenAI's route over our own, a stream of {TOKENS} tokens, median", "<=", 0.5, "ms",
     lambda r: _over(r, "tiny", "openai", "own", "whole_ms")),
    ("start to ready, native", "<=", 4, "s", lambda r: r["starts"]["native"]),
    ("start to ready, mxnet", "<=", 4, "s", lambda r: r["starts"]["mxnet"]),
    ("first token of a full-size model on disk", "<=", 1, "s", lambda r: r["cold"]["full"]),
    ("first token of a tiny model on disk", "<=", 0.5, "s", lambda r: r["cold"]["tiny"]),
    ("fetching and unpacking, against cp and tar", "<=", 1.2, "x", _slower),
    ("growth of RSS by loading and unloading", "<=", 5, "%", _growth_percent),
    ("growth of RSS in a batch of lines, MMS's aside", "<=", 5, "%",
     lambda r: batch.growth_percent(r["batch"])),
)  # fmt: skip


def lines(results: Results) -> str:
    return report.page(results, "the gateway", [rows(results)])


def rows(results: Results) -> Table:
    return ("", ""), _rows(results)


def _rows(results: Results) -> Iterator[Row]:
    if measured := results.get("calls"):
        for name, key in (("the gateway", "gateway_ms"), ("MMS's own socket", "mms_ms")):
            p99 = statistics.quantiles(measured[key], n=100)[98]
            cell = f"{statistics.median(measured[key]):.2f} (p99 {p99:.2f})"
            yield f"a small call to {name}, ms", cell
    labels = {"engine": "the engine's socket", "own": "/predictions", "openai": "/v1/completions"}
    for size, ways in results.get("streams", {}).items():
        for way, times in ways.items():
            first, whole = (statistics.median(times[key]) for key in ("first_ms", "whole_ms"))
            what = f"a stream of {TOKENS} tokens, {size} model, {labels.get(way, 'gRPC')}"
            yield f"{what}: first and last, ms", f"{first:.2f} and {whole:.2f}"
    if measured := results.get("fetching"):
        way, size = measured["their_way"], f"{mb(measured['bytes'])} MB"
        ours, theirs = ([e["seconds"] for e in measured[key]] for key in ("ours", "theirs"))
        yield f"{size} from S3, unpacked, by the server: s", shown(ours, 2)
        yield f"the same by {way} and tar: s", shown(theirs, 2)
        parts = report.medians(measured["theirs"])
        cell = f"{parts['download_s']:.2f} and {parts['unpack_s']:.2f}"
        yield f"of that, {way} and tar: s", cell
    if measured := results.get("cycles"):
        sizes = (mb(measured[when]["rss_bytes"]) for when in ("before", "after"))
        loads = f"{measured['cycles']} loads and unloads, MB"
        yield f"RSS of the engine before and after {loads}", " and ".join(sizes)
    if measured := results.get("batch"):
        yield from batch.rows(measured)


class GatewayRun(Run):
    plan: Plan
    PLAN = Plan()
    QUICK = Plan(random_model.TINY, 1, 1, 20, 3, 2, 1, 3, warm_up=5, settling=2, lines=200)
    PARTS = DEFAULT = ("starts", "calls", "streams", "cold", "fetching", "cycles", "batch")
    GOALS = GOALS
    LINES = lines

    def prepare(self) -> None:
        self.full = random_model.make(self.store, self.plan.config, 0)
        self.names = {"tiny": self.tiny.name, "full": self.full.name}
        self.grpc_port = free_port() if importlib.util.find_spec("grpc") else 0

    @cached_property
    def server(self) -> Server:
        """The server with both models, for the parts calls, streams and cold."""
        models = {folder.name: folder for folder in (self.tiny, self.full)}
        environment = {"GRPC_PORT": str(self.grpc_port)}
        log, backend = self.log("gateway"), BACKENDS["mxnet"]
        server = Server(self.store, log, models, backend, environment)
        return self.opened.enter_context(server)

    def starts(self) -> Results:
        """Measure seconds from `serve` to ready, by backend, in turns; keep the last server."""

        def start(backend: tuple[str, str]) -> float:
            with Server(self.store, self.log("starts"), backend=backend) as server:
                return server.ready_s

        ways = {name: partial(start, backend) for name, backend in BACKENDS.items()}
        measured = in_turns(ways, self.plan.starts - 1)
        measured["native"].append(ways["native"]())
        measured["mxnet"].append(self.server.ready_s)
        return measured

    def calls(self) -> Results:
        """Measure milliseconds of a small call to the gateway's port and MMS's socket, in turns.

        Each side has one connection, which stays open.
        """
        body = {"inputs": self.text, "parameters": {"max_new_tokens": 1}}
        tiny, sockets = self.names["tiny"], self.server.run_dir / "mms.sock"
        with (
            contextlib.closing(self.server.connect()) as gateway,
            contextlib.closing(UnixConnection(sockets)) as mms,
        ):
            ways = {
                "gateway_ms": partial(call, gateway, f"/models/{tiny}/invoke", body),
                "mms_ms": partial(call, mms, f"/models/{self.server.id_of(tiny)}/invoke", body),
            }
            measured = in_turns(ways, self.plan.calls, self.plan.warm_up)
        return {name: in_ms(seconds for seconds, _ in each) for name, each in measured.items()}

    def streams(self) -> Results:
        """Measure milliseconds to a stream's first bytes (`first_ms`) and to its end, in all ways.

        One client sends the same text to the engine's own socket and by each route in turns.
        """
        measured: Results = {}
        for size, model in self.names.items():
            with contextlib.ExitStack() as opened:
                ways = self._ways(model, opened)
                times = in_turns(ways, self.plan.streams, min(STREAM_WARM_UP, self.plan.warm_up))
            measured[size] = {
                way: {
                    "first_ms": in_ms(first for first, _ in each),
                    "whole_ms": in_ms(whole for _, whole in each),
                }
                for way, each in times.items()
            }
        return measured

    def _ways(self, name: str, opened: contextlib.ExitStack) -> dict[str, Way]:
        ours = {"inputs": self.text, "parameters": {"max_new_tokens": TOKENS}, "stream": True}
        openais: Results = {"model": name, "prompt": self.text, "stream": True}
        openais |= {"max_tokens": TOKENS, "temperature": 0}

        def connected(connection: http.client.HTTPConnection, path: str, body: Any) -> Way:
            opened.callback(connection.close)
            return partial(_stream, connection, path, json.dumps(body).encode())

        server = self.server
        engine = UnixConnection(server.run_dir / "engine.sock")
        path = f"/models/{server.engines_name(name)}/generate"
        ways = {
            "engine": connected(engine, path, {**ours, "timeout_s": 60}),
            "own": connected(server.connect(), f"/predictions/{name}", ours),
            "openai": connected(server.connect(), "/v1/completions", openais),
        }
        if self.grpc_port:
            ways["grpc"] = _grpc_way(self.grpc_port, name, self.text, opened)
        return ways

    def cold(self) -> Results:
        """Measure seconds of a call for one token of a prepared model that is not loaded."""
        measured: Results = {}
        with contextlib.closing(self.server.connect()) as connection:
            for size, name in self.names.items():
                measured[size] = []
                for _ in range(self.plan.cold_calls):
                    self.server.unload(name)
                    measured[size].append(ask(connection, name, self.text, 1)[0])
        return measured

    def batch(self) -> Results:
        body = {"inputs": self.text, "parameters": {"max_new_tokens": 1}}
        name, lines = self.names["tiny"], self.plan.lines
        return batch.measure(self.server, name, body, b'"generated_text"', lines)

    def fetching(self) -> Results:
        config = dataclasses.replace(self.plan.config, num_layers=self.plan.archived_layers)
        folder = random_model.make(self.store, config, 200, "float16")
        archive = random_model.pack(folder, self.workdir / f"{folder.name}.tar.gz", level=6)
        return fetching.measure(archive, self.plan.fetches, self.workdir, self.log("fetching"))

    def cycles(self) -> Results:
        plan, log = self.plan, self.log("cycles")
        return measure_cycles(self.full, self.text, plan.cycles, plan.settling, log)


def _stream(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[float, float]:
    connection.close()  # the server closes idle connections
    connection.connect()
    began = time.perf_counter()
    connection.request("POST", path, body, HEADERS)
    answer = connection.getresponse()
    content = answer.read1()
    first = time.perf_counter() - began
    content += answer.read()
    whole = time.perf_counter() - began
    if answer.status != 200 or b'"error"' in content:
        raise ProgramError(f"{path} answered {answer.status}: {content!r:.300}")
    return first, whole


def _grpc_way(port: int, name: str, text: str, opened: contextlib.ExitStack) -> Way:
    import grpc

    from serving.api.grpc.inference import SERVICE
    from serving.api.grpc.messages import message

    channel = opened.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
    stream = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        request_serializer=message("inference.ModelInferRequest").SerializeToString,
        response_deserializer=message("inference.ModelStreamInferResponse").FromString,
    )
    request = message("inference.ModelInferRequest")(model_name=name)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    request.parameters["max_new_tokens"].int64_param = TOKENS

    def ask() -> tuple[float, float]:
        began = time.perf_counter()
        responses = stream(iter([request]), timeout=60)
        answers = [next(responses)]
        first = time.perf_counter() - began
        answers += responses
        whole = time.perf_counter() - began
        if errors := [answer.error_message for answer in answers if answer.error_message]:
            raise ProgramError(f"gRPC answered: {errors[0]}")
        return first, whole

    return ask
