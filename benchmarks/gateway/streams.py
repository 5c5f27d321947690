"""Measured: a stream's way through the gateway, by our own route, OpenAI's and gRPC.

One client asks for the same text in turns: of the engine's own socket and by each route, so that
differences are those of neighbours in time.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.process import BenchmarkError
from benchmarks.report.goals import Goal, Results
from benchmarks.report.tables import Row
from benchmarks.server import HEADERS, Server, free_port
from engine.http.client import UnixConnection

TOKENS = 32
WARM_UP = 10
SIZES = ("tiny", "full")

# Asks once; gives when the first bytes came and when the last, in seconds.
Way = Callable[[], tuple[float, float]]


def measure(store: Path, folders: dict[str, Path], text: str, count: int, log: Path) -> Results:
    """By size and way, milliseconds to the first bytes (`first_ms`) and of the whole stream."""
    port = free_port() if importlib.util.find_spec("grpc") else 0
    environment = {"GRPC_PORT": str(port)}
    with Server(store, log, folders, environment=environment) as server, ExitStack() as opened:
        return {size: _measure(_ways(server, port, size, text, opened), count) for size in SIZES}


def _measure(ways: dict[str, Way], count: int) -> Results:
    measured: Results = {name: {"first_ms": [], "whole_ms": []} for name in ways}
    for i in tqdm(range(WARM_UP + count), leave=False, disable=None):
        for name, ask in ways.items():
            first, whole = ask()
            if i >= WARM_UP:
                measured[name]["first_ms"].append(1000 * first)
                measured[name]["whole_ms"].append(1000 * whole)
    return measured


def _ways(server: Server, port: int, name: str, text: str, opened: ExitStack) -> dict[str, Way]:
    parameters = {"max_new_tokens": TOKENS}
    ours = {"inputs": text, "parameters": parameters, "stream": True}
    openais = {"model": name, "prompt": text, "stream": True}
    openais |= {"max_tokens": TOKENS, "temperature": 0}

    def connected(connection: http.client.HTTPConnection, path: str, body: Any) -> Way:
        opened.callback(connection.close)
        content = json.dumps(body).encode()
        return lambda: _ask(connection, path, content)

    engine = UnixConnection(server.run_dir / "engine.sock")
    path = f"/models/{server.engines_name(name)}/generate"
    ways = {
        "engine": connected(engine, path, {**ours, "timeout_s": 60}),
        "own": connected(server.connect(), f"/predictions/{name}", ours),
        "openai": connected(server.connect(), "/v1/completions", openais),
    }
    if port:
        ways["grpc"] = _grpc_way(port, name, text, opened)
    return ways


def _ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[float, float]:
    connection.close()  # one that rests for long is closed by the other side
    connection.connect()
    began = time.perf_counter()
    connection.request("POST", path, body, HEADERS)
    answer = connection.getresponse()
    first_bytes = answer.read1()
    first = time.perf_counter() - began
    rest = answer.read()
    whole = time.perf_counter() - began
    if answer.status != 200 or b'"error"' in rest:
        raise BenchmarkError(f"{path} answered {answer.status}: {first_bytes + rest!r:.300}")
    return first, whole


def _grpc_way(port: int, name: str, text: str, opened: ExitStack) -> Way:
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
            raise BenchmarkError(f"gRPC answered: {errors[0]}")
        return first, whole

    return ask


# What is made of it


def over(results: Results, size: str, way: str, other: str, key: str = "first_ms") -> list[float]:
    """What `way` takes longer than `other`: the median of the differences of neighbours."""
    measured = results["streams"][size]
    pairs = zip(measured[way][key], measured[other][key], strict=True)
    return [statistics.median(a - b for a, b in pairs)]


GOALS: tuple[Goal, ...] = (
    (
        "first bytes of a full-size model's stream after the engine's, median",
        "<=",
        3,
        "ms",
        lambda r: over(r, "full", "own", "engine"),
    ),
    (
        "OpenAI's route over our own, first bytes, median",
        "<=",
        0.5,
        "ms",
        lambda r: over(r, "tiny", "openai", "own"),
    ),
    (
        f"OpenAI's route over our own, a stream of {TOKENS} tokens, median",
        "<=",
        0.5,
        "ms",
        lambda r: over(r, "tiny", "openai", "own", "whole_ms"),
    ),
)


def rows(measured: Results) -> Iterator[Row]:
    labels = {"engine": "the engine's socket", "own": "/predictions", "openai": "/v1/completions"}
    for size, ways in measured.items():
        for way, times in ways.items():
            first, whole = (statistics.median(times[key]) for key in ("first_ms", "whole_ms"))
            what = f"a stream of {TOKENS} tokens, {size} model, {labels.get(way, 'gRPC')}"
            yield f"{what}: first and last, ms", f"{first:.2f} and {whole:.2f}"
