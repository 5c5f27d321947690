"""A script's calls to its own model in the engine."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

from common.errors import InvalidRequest, Overloaded
from handlers.text import text_model
from handlers.user_code.engine_proxy import MAX_CALLS, EngineModel, serve
from handlers.user_code.messages import error_from, receive, send
from tests.processes import no_thread_starts

WIDE_S = 60


class Handle:
    """A fake of `engine.http.client.ModelHandle`."""

    def __init__(self) -> None:
        self.model = {"name": "시"}
        self.together = threading.Barrier(2)
        self.closed = threading.Event()
        self.go_on = threading.Event()

    def generate(
        self, inputs: str, parameters: dict[str, Any], timeout_s: float, request_id: str | None
    ) -> dict[str, Any]:
        if inputs == "나쁨":
            raise InvalidRequest("온도가 틀림")
        if inputs == "기다림":
            assert self.go_on.wait(WIDE_S)
        if inputs == "함께":
            self.together.wait(WIDE_S)
        return {"text": inputs, "parameters": parameters, "timeout_s": timeout_s, "id": request_id}

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    made = {("/모델", "시"): Handle()}
    monkeypatch.setattr(text_model, "model_fn", lambda *given: made[given])
    return made["/모델", "시"]


@pytest.fixture
def connection(handle: Handle) -> Iterator[Connection]:
    ours, theirs = Pipe()
    worker = threading.Thread(target=serve, args=(ours, "시", "/모델"))
    worker.start()
    yield theirs
    with socket.socket(fileno=os.dup(theirs.fileno())) as script:  # a thread reads from it
        script.shutdown(socket.SHUT_RDWR)
    worker.join(WIDE_S)
    assert not worker.is_alive()


def test_a_call_has_the_engines_answer_or_error(connection: Connection) -> None:
    model = EngineModel(connection)
    assert model.model == {"name": "시"}
    expected = {"text": "봄", "parameters": {"seed": 1}, "timeout_s": 5.0, "id": "a"}
    assert model.generate("봄", {"seed": 1}, 5, "a") == expected
    with pytest.raises(InvalidRequest, match="온도가 틀림"):
        model.generate("나쁨", {})


@pytest.mark.parametrize("call", [5, [], ["봄", {}, "곧", None], ["봄", {}, None, None]], ids=str)
def test_a_malformed_call_gets_an_error_and_no_traceback_in_the_log(
    connection: Connection, caplog: pytest.LogCaptureFixture, call: object
) -> None:
    """A script could repeat it without limit."""
    send(connection, {"call": 0})
    assert "answer" in receive(connection)[0]
    send(connection, {"generate": call, "call": 1})
    reply = receive(connection)[0]
    assert reply["error"]["type"] == "InvalidRequest"
    assert "malformed" in reply["error"]["message"]
    assert not caplog.records


def test_calls_wait_for_a_thread_where_no_more_start(
    connection: Connection, handle: Handle
) -> None:
    model, clients_started = EngineModel(connection), threading.Barrier(4)
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda _: clients_started.wait(WIDE_S), range(4)))
        with no_thread_starts() as refused:
            calls = [clients.submit(model.generate, "기다림", {}) for _ in range(4)]
            assert refused.wait(WIDE_S)
            handle.go_on.set()
            assert [call.result(WIDE_S)["text"] for call in calls] == ["기다림"] * 4


def test_calls_of_several_threads_run_concurrently(connection: Connection) -> None:
    model = EngineModel(connection)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(model.generate, "함께", {"i": i}) for i in range(2)]
        assert [a.result(WIDE_S)["parameters"] for a in answers] == [{"i": 0}, {"i": 1}]


def test_calls_beyond_a_number_are_refused_and_those_before_are_answered(
    connection: Connection, handle: Handle
) -> None:
    def call(number: int, inputs: str) -> None:
        send(connection, {"generate": [inputs, {}, 60, None], "call": number})

    def replies(count: int) -> dict[int, dict[str, Any]]:
        received = [receive(connection)[0] for _ in range(count)]
        return {reply["call"]: reply for reply in received}

    send(connection, {"call": -1})
    assert replies(1)[-1]["answer"] == handle.model
    for number in range(MAX_CALLS + 3):
        call(number, "기다림")
    refused = replies(3)
    assert sorted(refused) == [MAX_CALLS, MAX_CALLS + 1, MAX_CALLS + 2]
    for reply in refused.values():
        error = error_from(reply["error"])
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 1
        assert "256 calls of the script wait for its model" in error.message
    handle.go_on.set()
    answered = replies(MAX_CALLS)
    assert sorted(answered) == list(range(MAX_CALLS))
    assert all(reply["answer"]["text"] == "기다림" for reply in answered.values())
    call(0, "봄")
    assert replies(1)[0]["answer"]["text"] == "봄"


@pytest.mark.parametrize("nonsense", [b"{", b"[]", b'{"bodies": -1}', b'{"inputs": 1}', b"1"])
def test_a_malformed_message_ends_the_calls_and_releases_the_model(
    handle: Handle, connection: Connection, nonsense: bytes
) -> None:
    EngineModel(connection)
    connection.send_bytes(nonsense)
    assert handle.closed.wait(WIDE_S)
