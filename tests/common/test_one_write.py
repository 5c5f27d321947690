"""What uvicorn writes of an answer, write by write."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.one_write import MAX_BYTES, join

BODY = "가나다".encode()
LENGTH = (b"content-length", b"%d" % len(BODY))


class Recorder(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def answered(method: str, headers: list[tuple[bytes, bytes]], *bodies: bytes) -> Recorder:
    """Of an application that fails behind the last body unless it says that it is the last."""
    recorder = Recorder()

    async def run() -> None:
        cycle = RequestResponseCycle(
            scope={"type": "http", "method": method, "http_version": "1.1"},  # type: ignore[arg-type]
            transport=recorder,
            flow=FlowControl(recorder),
            logger=logging.getLogger("none"),
            access_logger=logging.getLogger("none"),
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=lambda: None,
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            messages: list[Any] = [
                {"type": "http.response.start", "status": 200, "headers": headers}
            ]
            messages += [
                {"type": "http.response.body", "body": body, "more_body": i < len(bodies) - 1}
                for i, body in enumerate(bodies)
            ]
            for message in messages:
                join(cycle, message)
                await send(message)
            if not bodies:
                raise ValueError("no body")

        await cycle.run_asgi(app)

    asyncio.run(run())
    return recorder


def test_an_answer_of_known_length_is_one_write() -> None:
    (only,) = answered("GET", [LENGTH], BODY).writes
    assert only.startswith(b"HTTP/1.1 200 OK\r\n")
    assert only.endswith(b"\r\n\r\n" + BODY)


def test_its_further_pieces_are_written_as_they_come() -> None:
    first, second = answered("GET", [LENGTH], BODY[:4], BODY[4:]).writes
    assert first.endswith(b"\r\n\r\n" + BODY[:4])
    assert second == BODY[4:]


def test_a_long_body_is_not_copied() -> None:
    body = b"x" * (MAX_BYTES + 1)
    head, written = answered("GET", [(b"content-length", b"%d" % len(body))], body).writes
    assert head.endswith(b"\r\n\r\n")
    assert written == body


def test_the_head_of_a_stream_waits_for_nothing() -> None:
    head, *_ = answered("GET", [], BODY).writes
    assert head.endswith(b"transfer-encoding: chunked\r\n\r\n")


def test_an_answer_to_head_is_its_head() -> None:
    (head,) = answered("HEAD", [LENGTH], BODY).writes
    assert head.endswith(b"\r\n\r\n")


def test_an_answer_without_a_body_ends() -> None:
    (head,) = answered("GET", [(b"content-length", b"0")], b"").writes
    assert head.endswith(b"\r\n\r\n")


def test_a_head_behind_which_the_application_fails_is_sent_before_the_end() -> None:
    recorder = answered("GET", [LENGTH])
    assert len(recorder.writes) == 1
    assert recorder.closed
