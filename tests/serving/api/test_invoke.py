"""Deadlines, lines and lost workers, as the gateway's routes have them, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import EngineUnavailable, ModelNotFound, OutOfMemory
from serving.api.app import PASSIVE
from serving.errors import Unavailable
from serving.mms.client import Answer
from tests.serving.api.gateways import FakeEngine, World, always, answered, held, model, settle
from tests.serving.api.test_forms import RIGHT, WRONG
from tests.serving.virtual_time import VirtualLoop

pytestmark = pytest.mark.virtual_time

PATH = "/predictions/봄"
LATE = (
    "no answer within 0.1 s"
    " (REQUEST_TIMEOUT_S, the model's timeout_s, or the request's own timeout)"
)


def said(body: bytes) -> tuple[str, str]:
    error = json.loads(body)
    return error["type"], error["message"]


def block(seconds: float) -> None:
    """The loop is busy with something else."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds


@contextlib.asynccontextmanager
async def loading(name: str) -> AsyncIterator[Any]:
    """A load that does not end."""
    await asyncio.Event().wait()
    yield


async def test_every_try_is_told_what_is_left_of_the_requests_time() -> None:
    world = World(model(limit_s=5))

    async def answer(number: int) -> Answer:
        await asyncio.sleep(0.05)
        return answered(500, by_worker=False) if number < 2 else answered()

    world.mms.answer = answer
    status, _, _ = await world.call("POST", PATH)
    assert status == 200
    first, second, third = world.mms.told_s
    assert first <= 5
    assert second <= first - 0.05
    assert third <= second - 0.05


async def test_at_the_deadline_the_client_is_answered_and_the_engine_told() -> None:
    world = World(model(limit_s=0.1))

    async def answer(number: int) -> Answer:
        await world.engine.over.wait()  # as a worker does
        await release.wait()
        return answered(499)

    release = asyncio.Event()
    world.mms.answer = answer
    began = time.monotonic()
    status, _, body = await world.call("POST", PATH)
    assert time.monotonic() - began == pytest.approx(0.1)
    assert (status, said(body)) == (504, ("TimeoutException", LATE))
    await settle()
    assert len(world.engine.called_off) == 1
    # Its worker has not come back: nobody else gets its place, and the model stays.
    assert (world.model.line.running, world.model.in_flight) == (1, 1)
    assert world.gateway.requests == 0
    release.set()
    await asyncio.gather(*world.registry._tasks)
    assert (world.model.line.running, world.model.in_flight) == (0, 0)


async def test_a_load_that_takes_longer_than_the_request_has_is_not_waited_for() -> None:
    world = World(request_timeout_s=1)
    world.registry.use = loading  # type: ignore[method-assign]
    for path in (PATH, "/v2/models/봄/infer"):
        status, _, body = await world.call("POST", path)
        assert (status, b"no answer within 1 s" in body) == (504, True)
    world.model.shortage = OutOfMemory("model 봄 needs 2 MiB, but 17 are taken")
    status, headers, body = await world.call("POST", PATH)  # may be tried again
    assert (status, headers["retry-after"]) == (503, "1")
    reason = "no memory or disk became free within 1 s: model 봄 needs 2 MiB, but 17 are taken"
    assert said(body)[1] == reason


async def test_an_answer_that_is_read_after_the_deadline_is_not_sent() -> None:
    world = World(model(limit_s=0.1))

    async def answer(number: int) -> Answer:
        block(0.2)  # and the answer is there
        return answered()

    world.mms.answer = answer
    status, _, body = await world.call("POST", PATH)
    assert (status, said(body)) == (504, ("TimeoutException", LATE))
    await asyncio.gather(*world.registry._tasks)
    assert (world.model.line.running, world.model.in_flight) == (0, 0)


async def test_a_worker_that_does_not_come_back_in_time_is_no_other_error() -> None:
    world = World(model(limit_s=0.1))

    async def wait_for(model: Any, timeout_s: float) -> None:
        block(timeout_s)  # so that this comes before the deadline's own
        raise Unavailable("being loaded again", retry_after_s=1)

    world.mms.answer = always(answered(500, by_worker=False))
    world.recovery.wait_for = wait_for  # type: ignore[method-assign]
    status, _, body = await world.call("POST", PATH)
    assert (status, said(body)) == (504, ("TimeoutException", LATE))


OPENAIS = {"messages": [{"role": "user", "content": "안녕?"}]}
TGIS = {"inputs": "산에는", "parameters": {"details": False}}


@pytest.mark.parametrize("path", [PATH, "/invocations?model_name=봄"])
@pytest.mark.parametrize("too_busy", [False, True])
async def test_an_answer_that_is_late_is_504_in_the_format_of_its_body(
    path: str, too_busy: bool
) -> None:
    """Whether the deadline ends the wait, or the engine's error is read only after it."""
    world = World(model(limit_s=0.1), FakeEngine())

    async def generate(*_: Any) -> Any:
        if too_busy:
            block(0.2)
            raise EngineUnavailable("the engine is starting")
        await asyncio.Event().wait()

    async def stream(*asked: Any) -> AsyncIterator[Any]:  # TGI's answers are collected
        yield await generate(*asked)

    world.engine.generate = generate
    world.engine.stream = stream
    status, _, body = await world.call("POST", path, OPENAIS)
    error = json.loads(body)["error"]
    assert (status, error["type"], error["message"]) == (504, "server_error", LATE)
    status, _, body = await world.call("POST", path, TGIS)
    error = json.loads(body)
    assert (status, error["error"], error["error_type"]) == (504, LATE, "generation")
    assert (world.model.line.running, world.model.in_flight) == (0, 0)


@pytest.mark.parametrize(
    ("in_engine", "held", "expected"), [(True, False, 503), (True, True, 507), (False, False, 507)]
)
async def test_a_model_whose_memory_others_took_while_the_engine_was_away_is_503(
    in_engine: bool, held: bool, expected: int
) -> None:
    """Its worker cannot load it again: another server may answer, or this one later. What can never
    fit, and what a worker of its own says, is 507."""
    world = World(model())
    world.model.in_engine = in_engine
    world.model.connections = world.model.line.capacity
    world.engine.held = [world.model.engine_name] if held else []
    world.mms.answer = always(answered(507, b'{"code": 507}'))
    status, headers, _ = await world.call("POST", PATH)
    assert status == expected
    assert ("retry-after" in headers) is (expected == 503)


async def test_a_body_has_as_long_to_arrive() -> None:
    world = World(request_timeout_s=1)
    for path in (PATH, "/models"):
        status, _, body = await world.call("POST", path, more_body=True)
        assert (status, said(body)[0]) == (408, "RequestTimeoutException")


async def test_a_client_that_goes_while_it_waits_is_never_worked_on() -> None:
    world, gone = World(), asyncio.Event()
    async with held(world):
        second = asyncio.create_task(world.call("POST", PATH, gone=gone))
        await settle()
        assert len(world.model.line.waiting) == 1
        gone.set()
        await second
        assert len(world.model.line.waiting) == 0
    assert len(world.mms.told_s) == 1
    assert world.engine.called_off == []


async def test_where_multi_model_server_has_no_worker_it_is_asked_again_after_a_while() -> None:
    world = World()
    times: list[float] = []

    async def answer(number: int) -> Answer:
        times.append(time.monotonic())
        return answered(503, by_worker=False)

    world.mms.answer = answer
    status, headers, body = await world.call("POST", PATH)
    assert (status, headers["retry-after"]) == (503, "1")
    assert "no worker" in said(body)[1]
    assert len(times) == 3
    assert all(late - early >= 0.1 for early, late in itertools.pairwise(times))


async def test_all_bodies_together_are_bounded() -> None:
    world = World(max_request_bytes=100)
    body = b'"text"'.ljust(100)
    async with held(world, 32, body=body):
        status, headers, said_ = await world.call("POST", PATH, body)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "large bodies" in said(said_)[1]
    assert (await world.call("POST", PATH, body))[0] == 200
    assert world.gateway.body_bytes == 0


async def test_headers_of_a_service_reach_the_client_unless_they_are_dangerous() -> None:
    world = World()
    sent = {
        "X-Own": "1", "ETag": '"a"', "Content-Encoding": "gzip", "Retry-After": "7",
        "Connection": "close", "Transfer-Encoding": "chunked", "Set-Cookie": "a=b",
        "Content-Length": "7", "X-Request-Id": "theirs", "Odd": "가", "Date": "now",
        "Strict-Transport-Security": "max-age=1", "X-Served-Model": "forged",
    }  # fmt: skip
    world.mms.answer = always(answered(**sent))
    _, headers, body = await world.call("POST", PATH, x_request_id="ours")
    assert headers == {
        "x-own": "1",
        "etag": '"a"',
        "content-encoding": "gzip",
        "retry-after": "7",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": "ours",
        **{name.decode(): value.decode() for name, value in PASSIVE},
    }


ROUTES = [
    ("POST", PATH),
    ("POST", "/models/봄/invoke"),
    ("POST", "/invocations?model_name=봄"),
    ("POST", "/v2/models/봄/infer"),
    ("POST", "/v2/models/봄/versions/1/infer"),
    ("GET", "/v2/models/봄"),
    ("GET", "/v2/models/봄/ready"),
    ("GET", "/v2/health/ready"),
    ("GET", "/ping"),
    ("POST", "/models?url=x"),
    ("PUT", "/models/봄?min_worker=1"),
    ("DELETE", "/models/봄"),
]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"adopted": False, "started": False, "healthy": False}, "the server is starting"),
        ({"started": False}, "models are being loaded"),
        ({"started": False, "start_error": "봄: no room"}, "the model did not load: 봄: no room"),
        ({"start_error": "봄: no room"}, "the model did not load: 봄: no room"),
        ({"draining": True}, "the server is stopping"),
    ],
    ids=["before-the-start", "preloading", "failing", "failed", "draining"],
)
async def test_all_routes_agree_on_whether_the_server_is_ready(
    state: dict[str, Any], why: str
) -> None:
    world = World()
    for name, value in state.items():
        setattr(world.gateway, name, value)
    for method, path in ROUTES:
        status, _, body = await world.call(method, path)
        error = json.loads(body)
        assert (status, error.get("message", error.get("error"))) == (503, why), path
    assert (await world.call("GET", "/v2/health/live"))[0] == 200  # the gateway itself runs
    assert world.mms.told_s == []


@pytest.mark.parametrize("stops", [False, True])
async def test_clients_of_a_gateway_that_was_lost_wait_for_the_next_one(stops: bool) -> None:
    world = World()
    gateway = world.gateway
    gateway.takes_over, gateway.adopted, gateway.started = True, False, False
    waiting = [asyncio.create_task(world.call(*route)) for route in ROUTES[:5]]
    await settle()
    assert not any(task.done() for task in waiting)
    for path, status in (("/ping", 503), ("/v2/health/ready", 503), ("/v2/health/live", 200)):
        assert (await world.call("GET", path))[0] == status
    gateway.adopted = gateway.started = not stops
    gateway.draining = stops
    gateway.started_or_stopping.set()
    answers = await asyncio.gather(*waiting)
    assert {status for status, _, _ in answers} == {503 if stops else 200}
    assert all((b"the server is stopping" in body) == stops for _, _, body in answers)


async def test_a_version_is_that_of_the_model() -> None:
    world = World()
    world.model.metadata = {"versions": ["3"], "inputs": [{"name": "x"}]}
    status, _, body = await world.call("GET", "/v2/models/봄/versions/3")
    assert (status, json.loads(body)["inputs"]) == (200, [{"name": "x"}])
    assert (await world.call("POST", "/v2/models/봄/versions/3/infer"))[0] == 200
    for method, path in (("GET", ""), ("GET", "/ready"), ("POST", "/infer")):
        status, _, body = await world.call(method, f"/v2/models/봄/versions/4{path}")
        assert (status, json.loads(body)) == (404, {"error": "Model 봄 has version 3, not 4"})
    assert len(world.mms.told_s) == 1
    assert (world.model.line.running, world.model.in_flight) == (0, 0)


async def test_a_form_that_netty_could_not_take_reaches_no_worker() -> None:
    world = World()
    for forms, status in ((WRONG, 400), (RIGHT, 200)):
        for name, (kind, body) in forms.items():
            found, _, _ = await world.call("POST", PATH, body, **{"content-type": kind})
            assert found == status, name
    assert len(world.mms.told_s) == len(RIGHT)


async def test_a_stream_of_a_model_that_the_engine_has_lost_is_503_and_not_404() -> None:
    body = {"inputs": "가", "stream": True}
    lost = FakeEngine(*[ModelNotFound("model 봄 is not loaded")] * 99)
    status, headers, answer = await World(engine=lost).call("POST", PATH, body)
    assert (status, headers["retry-after"]) == (503, "1")
    assert said(answer) == ("ServiceUnavailableException", "Model 봄 is being loaded again")
