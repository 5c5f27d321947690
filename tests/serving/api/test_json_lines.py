"""Batches of lines, in virtual time: order, errors, places, backpressure, ends."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelNotFound
from serving.api.body_lines import STALL_S
from serving.api.http_protocol import DUPLEX
from serving.api.json_lines import MAX_PENDING, PATIENCE_S
from serving.mms.client import Answer
from tests.serving.api.gateways import (
    BEARER,
    FakeEngine,
    World,
    always,
    answered,
    model,
    settle,
    with_token,
)

pytestmark = pytest.mark.virtual_time

PATH = "/predictions/봄"
LINES = "application/jsonlines"


def line(number: int) -> bytes:
    return json.dumps({"inputs": f"나 보기가 역겨워 {number}"}, ensure_ascii=False).encode()


class Client:
    """Sends a body in pieces, and reads an answer while `reads` is set."""

    def __init__(self, world: World, path: str = PATH, **headers: str) -> None:
        sent = {"content-type": LINES, **headers}
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.taken = 0  # bytes of the body that the server has
        self.reads = asyncio.Event()
        self.reads.set()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.scope = world.scope("POST", path, **sent)
        self._call = asyncio.create_task(world.app(self.scope, self._receive, self._send))

    def send(self, *pieces: bytes, more: bool = False) -> Client:
        for i, piece in enumerate(pieces):
            more_body = more or i < len(pieces) - 1
            message = {"type": "http.request", "body": piece, "more_body": more_body}
            self._pieces.put_nowait(message)
        return self

    def leave(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> Any:
        message = await self._pieces.get()
        self.taken += len(message.get("body", b""))
        return message

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += message["body"]
            self.complete = not message.get("more_body", False)

    async def answers(self) -> list[Any]:
        """The values of all lines, once the answer has ended."""
        await self._call
        return [json.loads(one) for one in self.body.splitlines()]


class Echo:
    """Answers a call with its body, after `seconds` of the call's number."""

    def __init__(self, world: World, seconds: Any = lambda number: 0.01) -> None:
        self._world, self._seconds = world, seconds
        world.mms.answer = self
        self.running = self.most = 0

    async def __call__(self, number: int) -> Answer:
        body = self._world.mms.bodies[number]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self._seconds(number))
        finally:
            self.running -= 1
        return answered(200, body)


async def test_answers_have_the_order_of_the_lines_whichever_is_ready_first() -> None:
    world = World(model(capacity=5))
    Echo(world, lambda number: 0.1 * (7 - number % 7))
    client = Client(world).send(b"\n".join(map(line, range(50))))
    assert await client.answers() == [json.loads(line(i)) for i in range(50)]
    assert (client.status, client.headers["content-type"], client.complete) == (200, LINES, True)
    assert {h["content-type"] for h in world.mms.headers} == {"application/json"}
    assert {h["accept"] for h in world.mms.headers} == {"application/json"}
    id = client.headers["x-request-id"]
    assert {h["x-request-id"] for h in world.mms.headers} == {f"{id}-{i}" for i in range(1, 51)}


SENT = b'\xef\xbb\xbf{"inputs": "\xea\xb0\x80"}\r\n\n  \t\r\n "\xeb\x82\x98"\n{"a":\t1}'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_lines_are_those_of_the_body_however_it_is_cut(size: int) -> None:
    world = World()
    Echo(world)
    client = Client(world).send(*(SENT[i : i + size] for i in range(0, len(SENT), size)))
    assert await client.answers() == [{"inputs": "가"}, "나", {"a": 1}]
    assert world.mms.bodies == ['{"inputs": "가"}'.encode(), '"나"'.encode(), b'{"a":\t1}']
    assert world.gateway.body_bytes == 0


async def test_a_wrong_line_has_an_error_in_its_place() -> None:
    world = World(model(limit_s=5, capacity=4), max_request_bytes=1000)
    wrong = b'{"code": 400, "type": "InvalidRequest", "message": "\xea\xb0\x80"}'
    results = [
        answered(400, wrong),
        answered(422, "평범한 글".encode(), **{"content-type": "text/plain"}),
        answered(200, b'{\n "a": "\xea\xb0\x80\\n"\n}\n'),
        answered(200, "산에는\n꽃".encode(), **{"content-type": "text/plain"}),
        answered(200, b"\xff\x00", **{"content-type": "image/png"}),
        answered(500, b"{}", by_worker=False),
        answered(200, b'"\xea\xb0\x80"'),
    ]

    async def answer(number: int) -> Answer:
        index = int(world.mms.bodies[number].decode().rpartition(" ")[2][0])
        if index == 6:
            await asyncio.sleep(100)
        return results[min(index, 6)]

    world.mms.answer = answer
    body = [*map(line, range(6)), b"x" * 2000, line(6), line(7)]
    client = Client(world).send(b"\n".join(body))
    bad, plain, spaced, text, image, lost, long, late, last = await client.answers()
    assert bad == {"error": {"code": 400, "type": "InvalidRequest", "message": "가"}}
    assert plain == {"error": {"code": 422, "type": "ModelError", "message": "평범한 글"}}
    assert (spaced, text, last) == ({"a": "가\n"}, "산에는\n꽃", "가")
    assert image["error"]["type"] == lost["error"]["type"] == "WorkerFailedException"
    assert (long["error"]["code"], long["error"]["type"]) == (413, "RequestTooLargeException")
    assert (late["error"]["code"], late["error"]["type"]) == (504, "TimeoutException")
    assert client.complete


async def test_the_limits_of_bytes_and_time_are_those_of_a_line_not_of_the_body() -> None:
    world = World(model(limit_s=2), max_request_bytes=1000, request_timeout_s=2)
    Echo(world, lambda number: 1.5)
    client = Client(world).send(*(line(i) + b"\n" for i in range(100)))
    assert len(await client.answers()) == 100
    assert time.monotonic() >= 150
    assert b"error" not in client.body


async def test_a_line_that_is_refused_for_now_is_sent_again() -> None:
    world = World(model(capacity=3))
    busy = answered(
        503, b'{"code": 503, "type": "Overloaded", "message": "x"}', **{"retry-after": "7"}
    )

    async def answer(number: int) -> Answer:
        return busy if number in (0, 1, 4) else answered(200, world.mms.bodies[number])

    world.mms.answer = answer
    client = Client(world).send(b"\n".join(map(line, range(4))))
    assert await client.answers() == [json.loads(line(i)) for i in range(4)]
    assert 7 <= time.monotonic() < 30


async def test_a_line_that_is_refused_for_too_long_has_the_refusal() -> None:
    world = World()
    busy = b'{"code": 503, "type": "Overloaded", "message": "\xea\xb0\x80"}'
    world.mms.answer = always(answered(503, busy, **{"retry-after": "5"}))
    (answer,) = await Client(world).send(line(0)).answers()
    assert answer == {"error": {"code": 503, "type": "Overloaded", "message": "가"}}
    assert PATIENCE_S - 10 < time.monotonic() <= PATIENCE_S


async def test_a_full_queue_is_waited_for() -> None:
    world = World(model(capacity=1), max_waiting=1)
    world.model.line.max_waiting = 1
    Echo(world, lambda number: 3)
    others = [asyncio.create_task(world.call("POST", PATH)) for _ in range(2)]
    await settle()
    client = Client(world).send(line(0))
    assert await client.answers() == [json.loads(line(0))]
    assert {(await other)[0] for other in others} == {200}


async def test_batches_leave_one_of_the_places_to_single_requests_and_take_turns() -> None:
    world = World(model(capacity=4))
    echo = Echo(world, lambda number: 1)
    first = Client(world).send(b"\n".join(map(line, range(30))))
    await settle()
    second = Client(world).send(b"\n".join(map(line, range(30, 60))))
    await asyncio.sleep(5)
    assert (world.model.line.running, len(world.model.line.waiting)) == (3, 0)
    began = time.monotonic()
    status, _, _ = await world.call("POST", PATH)
    assert (status, time.monotonic() - began) == (200, pytest.approx(1))
    assert echo.most == 4
    assert len(second.body.splitlines()) >= len(first.body.splitlines()) / 2 > 3
    assert len(await first.answers()) == len(await second.answers()) == 30
    assert time.monotonic() == pytest.approx(20, abs=1)
    assert len(world.gateway.line_places) == 0


async def test_nothing_is_computed_or_read_for_a_client_that_does_not_read() -> None:
    world = World(model(capacity=8), max_request_bytes=10_000)
    Echo(world)
    client = Client(world).send(*(line(i) + b"\n" for i in range(1500)))
    await asyncio.sleep(0.1)
    client.reads.clear()
    await asyncio.sleep(STALL_S / 3)
    count, taken = len(world.mms.bodies), client.taken
    await asyncio.sleep(STALL_S / 3)
    assert (len(world.mms.bodies), client.taken) == (count, taken)
    assert count <= len(client.body.splitlines()) + 2 * MAX_PENDING + 1
    assert taken <= sum(map(len, world.mms.bodies)) + 2 * 10_000
    client.reads.set()
    assert len(await client.answers()) == 1500
    assert world.gateway.body_bytes == 0


async def test_a_client_owes_a_line_only_while_it_waits_for_no_answer() -> None:
    world = World(model(capacity=1))
    Echo(world, lambda number: 20)
    client, began = Client(world), time.monotonic()

    async def owes_since(after_s: float) -> float | None:
        await asyncio.sleep(after_s)
        since: float | None = client.scope[DUPLEX]()
        return None if since is None else since - began

    assert await owes_since(10) == pytest.approx(0, abs=0.1)
    client.send(line(0) + b"\n", more=True)
    assert await owes_since(15) is None  # its line is answered
    assert await owes_since(15) == pytest.approx(30, abs=0.1)
    client.send(line(1)[:9], more=True)
    assert await owes_since(10) == pytest.approx(30, abs=0.1)
    client.reads.clear()
    client.send(line(1)[9:] + b"\n", more=True)
    assert await owes_since(30) is None  # it has yet to read the answer
    client.reads.set()
    assert await owes_since(10) == pytest.approx(80, abs=0.1)
    client.send(b"")
    assert len(await client.answers()) == 2


async def test_a_client_that_pauses_loses_no_lines() -> None:
    """What the kernels hold of its body arrives meanwhile."""
    world = World(model(capacity=8), max_request_bytes=10_000)
    Echo(world)
    client = Client(world).send(line(0) + b"\n", more=True)
    for pause in range(3):
        await settle()
        client.reads.clear()
        begun, sent = client.taken, [line(i) + b"\n" for i in range(pause * 500, pause * 500 + 500)]
        client.send(*sent, more=True)
        await asyncio.sleep(3 * STALL_S)
        assert 15_000 < client.taken - begun == sum(map(len, sent))
        client.reads.set()
        await asyncio.sleep(STALL_S)
    client.send(line(1500))
    answers = [json.loads(line(i)) for i in (0, *range(1501))]
    assert await client.answers() == answers
    assert world.gateway.body_bytes == 0


async def test_a_client_that_sends_all_before_it_reads_gets_an_answer_with_the_reason() -> None:
    world = World(model(capacity=8), max_request_bytes=10_000)
    Echo(world)
    client = Client(world).send(*(line(i) + b"\n" for i in range(5000)))
    client.reads.clear()
    body = sum(len(line(i)) + 1 for i in range(5000))
    while client.taken < body:  # which it has to send first
        await asyncio.sleep(1)
    client.reads.set()
    *answers, error = await client.answers()
    assert answers == [json.loads(line(i)) for i in range(len(answers))]
    assert len(answers) > 10_000 // (len(line(5000)) + 1)  # what was read ahead is answered
    assert error["error"]["code"] == 413
    assert "read the answers while you send" in error["error"]["message"]
    assert client.complete
    assert world.gateway.body_bytes == 0


async def test_answers_come_while_the_body_still_does() -> None:
    world = World()
    Echo(world)
    client = Client(world).send(line(0) + b"\n" + line(1)[:9], more=True)
    await asyncio.sleep(1)
    assert client.body.splitlines() == [line(0)]
    client.send(line(1)[9:])
    assert len(await client.answers()) == 2


async def test_a_client_that_disconnects_ends_its_running_lines() -> None:
    world = World(model(capacity=4), engine=FakeEngine())
    world.mms.answer = always(answered(), after=asyncio.Event())
    client = Client(world).send(b"\n".join(map(line, range(50))), more=True)
    await settle()
    assert len(world.mms.bodies) == 3
    client.leave()
    await client._call
    await settle()
    assert len(world.engine.called_off) == 3
    assert (len(world.mms.bodies), world.gateway.requests, world.gateway.body_bytes) == (3, 0, 0)
    assert not client.complete


@pytest.mark.parametrize("waits", ["for its lines", "for its client"])
async def test_a_stop_ends_a_batch_after_the_lines_that_run(waits: str) -> None:
    world = World(model(capacity=3))
    Echo(world, lambda number: 1)
    count = 2 if waits == "for its client" else 30
    client = Client(world).send(b"".join(line(i) + b"\n" for i in range(count)), more=True)
    await asyncio.sleep(2.5 if waits == "for its client" else 0.5)
    world.gateway.draining = True
    world.gateway.stopping.set()
    await client._call
    assert client.body.splitlines() == [line(0), line(1)]
    assert (client.status, client.complete) == (200, False)  # the connection is cut
    assert world.gateway.requests == 0


async def test_what_does_not_depend_on_a_line_has_a_status_of_its_own(tmp_path: Path) -> None:
    world = World()
    for path, body, headers, status, message in (
        ("/predictions/없음", line(0), {}, 404, "없음"),
        (PATH, b"", {}, 400, "the body has no lines"),
        (PATH, b"\n \r\n", {}, 400, "the body has no lines"),
        (PATH, line(0), {"accept": "image/png"}, 406, LINES),
        (PATH, line(0), {"content-encoding": "gzip"}, 415, "without compression"),
        (PATH, line(0), {"content-type": LINES + "; charset=cp949"}, 415, "must be UTF-8"),
        ("/invocations", line(0), {}, 400, "say which model answers the lines"),
        ("/predictions/봄", line(0), {"x-amzn-sagemaker-session-id": "a"}, 200, ""),
        (
            "/invocations?model_name=봄",
            line(0),
            {"x-amzn-sagemaker-session-id": "a"},
            400,
            "session",
        ),
        ("/invocations?model_name=봄", line(0), {"accept": "application/json"}, 200, ""),
    ):
        if status == 404:
            world.gateway.lookups = Lost()  # type: ignore[assignment]
        client = Client(world, path, **headers).send(body)
        await client._call
        assert (client.status, message in client.body.decode()) == (status, True), client.body
    world.gateway.draining = True
    client = Client(world).send(line(0))
    await client._call
    assert (client.status, client.headers["retry-after"]) == (503, "5")


class Lost:
    async def find(self, name: str) -> Any:
        raise ModelNotFound(f"no {name}")


@pytest.mark.parametrize(
    "body", ['{"inputs": "가", "stream": true}', '{"prompt": "가", "stream": true}']
)
async def test_a_line_cannot_be_a_stream(body: str) -> None:
    token = {"text": "산", "token": 1, "index": 0, "prompt_tokens": 2}
    world = World(engine=FakeEngine(streamed=[token] * 3))
    answer, other = await Client(world).send(body.encode() + b"\n" + line(0)).answers()
    assert answer["error"]["code"] == 400
    assert 'leave out "stream"' in answer["error"]["message"]
    assert "generated_text" in other
    assert (world.engine.running, world.model.line.running, world.model.in_flight) == (0, 0, 0)


async def test_a_line_may_be_a_body_of_openai() -> None:
    world = World(engine=FakeEngine())
    body = '{"prompt": "가", "max_tokens": 3}\n{"prompt": 3}'.encode()
    good, wrong = await Client(world).send(body).answers()
    assert good["object"] == "text_completion"
    assert wrong["error"]["code"] == 400


async def test_each_line_counts_for_its_token(tmp_path: Path) -> None:
    world = await with_token(World(model(capacity=8)), tmp_path, concurrency=2)
    echo = Echo(world, lambda number: 1)
    client = Client(world, authorization=BEARER).send(b"\n".join(map(line, range(10))))
    assert len(await client.answers()) == 10
    assert time.monotonic() == pytest.approx(5)
    (token,) = world.gateway.tokens.all()
    assert (echo.most, token.usage.in_flight) == (2, 0)
    refused = Client(world, "/predictions/여름", authorization=BEARER).send(line(0))
    await refused._call
    assert (refused.status, token.usage.in_flight) == (403, 0)
    unknown = Client(world, authorization="Bearer wrong").send(line(0))
    await unknown._call
    assert unknown.status == 401


@pytest.mark.parametrize("ends", ["answered", "disconnected", "at once"])
async def test_a_token_has_no_request_in_flight_once_its_batch_has_ended(
    tmp_path: Path, ends: str
) -> None:
    world = await with_token(World(model(capacity=8)), tmp_path, concurrency=5)
    refused = answered(503, b"{}", **{"retry-after": "1"})

    async def answer(number: int) -> Answer:
        await asyncio.sleep(1)
        return refused if number < 7 else answered()

    world.mms.answer = answer
    client = Client(world, authorization=BEARER).send(b"\n".join(map(line, range(9))), more=True)
    if ends == "answered":
        client.send(b"")
        assert len(await client.answers()) == 9
    else:
        await asyncio.sleep(2.5 if ends == "disconnected" else 0)
        client.leave()
        await client._call
    (token,) = world.gateway.tokens.all()
    await settle()
    assert token.usage.in_flight == 0


async def test_lines_are_as_many_a_minute_as_their_token_may_send(tmp_path: Path) -> None:
    world = await with_token(World(model(capacity=8)), tmp_path, requests_per_minute=6)
    world.gateway.tokens.now = time.monotonic
    Echo(world)
    client = Client(world, authorization=BEARER).send(b"\n".join(map(line, range(17))))
    assert len(await client.answers()) == 17
    assert b"error" not in client.body
    assert time.monotonic() == pytest.approx(120, abs=2)  # 6 at once, with the batch itself


async def test_a_token_that_is_withdrawn_answers_no_more_lines(tmp_path: Path) -> None:
    world = await with_token(World(), tmp_path)
    Echo(world)
    client = Client(world, authorization=BEARER).send(line(0) + b"\n", more=True)
    await asyncio.sleep(1)
    world.gateway.tokens._tokens = {}
    good, bad = await client.send(line(1)).answers()
    assert (good, bad["error"]["code"]) == (json.loads(line(0)), 401)


async def test_metrics_count_lines_and_the_log_has_a_line_for_the_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()

    async def answer(number: int) -> Answer:
        return answered(400, b'{"message": "x"}') if number == 1 else answered()

    world.mms.answer = answer
    with caplog.at_level(logging.INFO):
        await Client(world).send(b"\n".join(map(line, range(5)))).answers()
    text = world.gateway.metrics.text(None, {"봄": "봄"}, {}).decode()
    assert 'kogpt2_requests_total{model="봄",status="200"} 4.0' in text
    assert 'kogpt2_requests_total{model="봄",status="400"} 1.0' in text
    (record,) = [r for r in caplog.records if r.message == "request"]
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["status"], fields["lines"], fields["error_lines"]) == (200, 5, 1)
    assert fields["model"] == "봄"
