"""Spans of the gateway's routes, by the real SDK, at a collector on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import EngineUnavailable, SettingError
from serving.aliases import Alias
from serving.api import tracing
from serving.gateway import _traced
from serving.mms.client import Answer
from serving.settings import Settings
from tests.e2e.server import free_port
from tests.processes import python
from tests.serving.api.collector import Collector, Span, collecting
from tests.serving.api.gateways import FakeEngine, World, always, answered, held, model
from tests.serving.fakes import Parts

PATH = "/predictions/봄"
PROMPT = "나 보기가 역겨워"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = f"00-{TRACE}-{PARENT}-01"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ITEMS = [
    {"index": 0, "text": "가실 ", "prompt_tokens": 5},
    {"index": 0, "text": "때"},
    {"index": 0, "text": "에는", "finish_reason": "stop"},
]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(tracing, "FLUSH_S", 60.0)  # a wide net
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        yield collector


@contextlib.asynccontextmanager
async def served(world: World) -> AsyncIterator[World]:
    """What a world's requests come to is with the collector at the end."""
    async with tracing.traced(world.gateway, world.app) as app:
        world.app = app  # type: ignore[assignment]
        yield world


def children(collector: Collector, span: Span) -> list[Span]:
    found = [other for other in collector.spans if other.parent == span.id]
    assert {other.trace for other in found} <= {span.trace}
    assert all(span.start <= other.start <= other.end <= span.end for other in found)
    return found


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


async def test_a_request_is_a_child_of_its_traceparent_and_a_worker_gets_its_own(
    collector: Collector,
) -> None:
    async with served(World()) as world:
        world.mms.answer = always(answered(**{"x-kogpt2-tokens": "7 3"}))
        status, headers, _ = await world.call("POST", PATH, {"inputs": PROMPT}, traceparent=SENT)
        assert status == 200
    (root,) = collector.named("POST /predictions/{name}")
    assert (root.trace, root.parent, root.is_error) == (TRACE, PARENT, False)
    assert root.service == "kogpt2-serving"
    assert root.attributes == {
        "http.request.method": "POST",
        "url.path": PATH,
        "url.scheme": "http",
        "http.route": "/predictions/{name}",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": [headers["x-request-id"]],
        "gen_ai.request.model": "봄",
        "gen_ai.response.model": "봄",
    }
    queue, whole = children(collector, root)
    assert (queue.name, queue.attributes) == ("queue", {})
    assert whole.name == "answer"
    assert whole.attributes == {
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
    }
    assert [sent["traceparent"] for sent in world.mms.headers] == [f"00-{TRACE}-{root.id}-01"]
    assert not any(PROMPT.encode() in sent or "가실".encode() in sent for sent in collector.bodies)


async def test_a_stream_has_a_span_until_its_first_token_and_one_from_there(
    collector: Collector,
) -> None:
    engine = FakeEngine(streamed=ITEMS)
    async with served(World(engine=engine)) as world:
        sent = {"inputs": PROMPT, "stream": True}
        status, _, text = await world.call("POST", PATH, sent)
        assert (status, "가실 때에는" in text.decode()) == (200, True)
        lost = EngineUnavailable("the engine ended in the middle of the answer")
        engine.streamed = [ITEMS[0], lost]
        assert (await world.call("POST", PATH, sent))[0] == 200
    root, _ = collector.named("POST /predictions/{name}")
    assert root.parent == ""
    queue, prompt, tokens = children(collector, root)
    assert names([queue, prompt, tokens]) == ["queue", "prompt", "tokens"]
    assert queue.end <= prompt.start <= prompt.end <= tokens.start
    counts = {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 3}
    assert tokens.attributes == counts
    (broken,) = (span for span in collector.spans if span.is_error)
    assert broken.name == "tokens"
    assert broken.attributes["error.type"] == "EngineUnavailable"
    assert broken.attributes["gen_ai.usage.output_tokens"] == 1


async def test_each_prompt_of_a_whole_answer_has_its_queue_and_its_tokens(
    collector: Collector,
) -> None:
    async with served(World(model(capacity=2), FakeEngine())) as world:
        world.gateway.aliases._take({"노래": Alias("노래", {"봄": 1})})
        sent = {"model": "노래", "prompt": [PROMPT, "산에는 꽃 피네"]}
        assert (await world.call("POST", "/v1/completions", sent))[0] == 200
    (root,) = collector.named("POST /v1/completions")
    models = root.attributes["gen_ai.request.model"], root.attributes["gen_ai.response.model"]
    assert models == ("노래", "봄")
    parts = children(collector, root)
    assert sorted(names(parts)) == ["answer", "answer", "queue", "queue"]
    for span in collector.named("answer"):
        assert span.attributes["gen_ai.usage.input_tokens"] == 3
        assert span.attributes["gen_ai.usage.output_tokens"] == 6


async def test_a_batch_of_lines_has_one_span_with_their_sums(collector: Collector) -> None:
    lines = b'{"inputs": "%b"}\n' % PROMPT.encode() * 101

    async def answer(number: int) -> Answer:
        return answered(400) if number == 100 else answered(**{"x-kogpt2-tokens": "7 3"})

    async with served(World()) as world:
        world.mms.answer = answer
        kind = {"content-type": "application/jsonlines"}
        status, _, body = await world.call("POST", PATH, lines, **kind)
        assert (status, body.count(b"\n")) == (200, 101)
        assert (await world.call("POST", PATH, {"inputs": PROMPT}))[0] == 200
    batch, single = sorted(collector.named("POST /predictions/{name}"), key=lambda span: span.start)
    sums = ("kogpt2.lines", "kogpt2.error_lines", "gen_ai.usage.input_tokens")
    assert [batch.attributes[name] for name in sums] == [101, 1, 700]
    assert batch.attributes["gen_ai.usage.output_tokens"] == 300
    assert children(collector, batch) == []
    assert names(children(collector, single)) == ["queue", "answer"]


async def test_a_request_that_waits_for_its_turn_has_that_in_its_queue(
    collector: Collector,
) -> None:
    async with served(World(model(capacity=1))) as world, held(world, 2):
        pass
    one, other = (children(collector, root) for root in collector.named("POST /predictions/{name}"))
    assert names(one) == names(other) == ["queue", "answer"]
    assert one[0].end <= other[0].start <= one[1].end <= other[0].end <= other[1].start


@pytest.mark.virtual_time
async def test_a_model_that_is_loaded_for_a_request_has_that_in_its_load(
    collector: Collector, tmp_path: Path
) -> None:
    parts = Parts(tmp_path, names=["봄"])
    world = World()
    real: Any = world.gateway
    real.registry, real.on_demand = parts.registry, parts.on_demand
    async with served(world):
        for _ in range(2):
            assert (await world.call("POST", PATH, {"inputs": PROMPT}))[0] == 200
        assert (await world.call("POST", "/predictions/없음", b"{}"))[0] == 404
    cold, warm, absent = collector.named("POST /predictions/{name}")
    assert names(children(collector, cold)) == ["load", "queue", "answer"]
    assert names(children(collector, warm)) == ["queue", "answer"]
    (load,) = children(collector, absent)
    assert (load.name, load.attributes["error.type"]) == ("load", "ModelNotInStore")
    assert (absent.is_error, absent.attributes["http.response.status_code"]) == (False, 404)


async def test_an_error_is_that_of_its_part_and_of_its_request(collector: Collector) -> None:
    async with served(World()) as world:
        world.model.line.max_waiting = 0
        async with held(world, answer=answered(500, '{"message": "고장"}'.encode())):
            assert (await world.call("POST", PATH))[0] == 429
        assert (await world.call("GET", "/nowhere"))[0] == 404
    failed, refused = collector.named("POST /predictions/{name}")
    assert (failed.is_error, failed.attributes["error.type"]) == (True, "500")
    (queue,) = children(collector, refused)
    assert (queue.is_error, queue.attributes["error.type"]) == (True, "TooManyRequests")
    assert (refused.is_error, refused.attributes["http.response.status_code"]) == (False, 429)
    (unrouted,) = collector.named("GET")
    assert "http.route" not in unrouted.attributes


async def test_odd_names_and_contexts_of_a_client_leave_a_small_trace(collector: Collector) -> None:
    long = "꽃" * 20_000
    async with served(World()) as world:
        assert (await world.call("POST", f"/predictions/{long}"))[0] == 404
        for odd in ("", "00-x", f"00-{'0' * 32}-{PARENT}-01", "가"):
            assert (await world.call("POST", PATH, traceparent=odd))[0] == 200
    roots = collector.named("POST /predictions/{name}")
    for name in ("url.path", "gen_ai.request.model"):
        assert len(roots[0].attributes[name]) < 3000
    assert [root.parent for root in roots] == [""] * 5
    assert len({root.trace for root in roots}) == 5


async def test_the_sampler_of_the_environment_and_of_the_client_decide(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "시")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")  # as if it were not set
    async with served(World()) as world:
        for sent in ({}, {"traceparent": SENT[:-1] + "0"}, {"traceparent": SENT}):
            assert (await world.call("POST", PATH, **sent))[0] == 200
    (root,) = collector.named("POST /predictions/{name}")
    assert (root.parent, root.service) == (PARENT, "시")
    assert collector.headers["authorization"] == "Bearer abc"
    _, off, on = (sent["traceparent"] for sent in world.mms.headers)
    assert off.startswith(f"00-{TRACE}-")
    assert (off[-2:], on[-2:]) == ("00", "01")


async def test_health_and_metrics_have_no_spans(collector: Collector) -> None:
    async with served(World()) as world:
        for path in ("/ping", "/health", "/v2/health/live", "/metrics"):
            assert (await world.call("GET", path))[0] == 200
    assert collector.bodies == []


@pytest.mark.parametrize("status", [0, 401, 503])
async def test_a_collector_that_fails_fails_no_request_and_floods_no_log(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: Any, status: int
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")  # an export each span
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    collector.status = status
    if not status:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{free_port()}")  # nothing listens there
    with caplog.at_level(logging.INFO):
        async with served(World()) as world:
            for _ in range(3):
                assert (await world.call("POST", PATH))[0] == 200
    lines = [record.getMessage() for record in caplog.records]
    (line,) = (line for line in lines if line != "request")  # of three exports
    assert line.startswith("traces: Failed to export span")
    assert status != 401 or "401" in line


async def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_stop(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    collector.go.clear()
    async with served(World()) as world:
        assert (await world.call("POST", PATH))[0] == 200
        assert await asyncio.to_thread(collector.reached.wait, 60)
        for _ in range(10):
            assert (await world.call("POST", PATH))[0] == 200
    assert collector.bodies == []
    collector.go.set()


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "must be 'http/protobuf'"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000", "a variable OTEL_"),
    ],
)
async def test_a_variable_that_cannot_be_ends_the_start_with_the_reason(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError, match=reason):
        async with served(World()):
            pass


# Without it


async def test_either_variable_turns_it_on_and_without_them_nothing_is_in_a_requests_way() -> None:
    for variable in (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        settings = Settings.read([], {variable: "http://127.0.0.1:1"})
        world = World(otlp_endpoint=settings.otlp_endpoint)
        async with _traced(world.gateway, world.app) as app:
            assert app is not world.app
    world = World()
    parts = dict(vars(world.gateway))
    async with _traced(world.gateway, world.app) as app:
        assert app is world.app
    assert vars(world.gateway) == parts
    program = "import sys, serving.gateway; print([m for m in sys.modules if 'telemetry' in m])"
    done = python("-c", program)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


async def test_a_traceparent_reaches_the_worker_and_the_log_as_it_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    odd = ("00-x", SENT.upper(), f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", "가")
    with caplog.at_level(logging.INFO):
        assert (await world.call("POST", PATH, traceparent=SENT))[0] == 200
        for sent in odd:
            assert (await world.call("POST", PATH, traceparent=sent))[0] == 200
    assert [sent.get("traceparent") for sent in world.mms.headers] == [SENT] + [None] * len(odd)
    logged: Any = [record for record in caplog.records if record.getMessage() == "request"]
    assert [line.fields.get("trace_id") for line in logged] == [TRACE] + [None] * len(odd)
