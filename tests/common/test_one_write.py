"""How an answer is written to its connection: in one write where its body is short and known."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.one_write import MAX_BYTES, join

BODY = "가나다".encode()
LONG = b"x" * (MAX_BYTES + 1)


class Recorder(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def answered(method: str, length: int | None, *bodies: bytes) -> Recorder:
    """The writes of uvicorn for an application that fails after the head if it has no body."""
    recorder = Recorder()
    headers = [] if length is None else [(b"content-length", b"%d" % length)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        messages: list[Any] = [{"type": "http.response.start", "status": 200, "headers": headers}]
        for i, body in enumerate(bodies, 1):
            more = i < len(bodies)
            messages.append({"type": "http.response.body", "body": body, "more_body": more})
        for message in messages:
            join(cycle, message)
            await send(message)
        if not bodies:
            raise ValueError("no body")

    async def run() -> None:
        nonlocal cycle
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
        await cycle.run_asgi(app)

    cycle: Any = None
    asyncio.run(run())
    return recorder


@pytest.mark.parametrize(
    ("method", "length", "bodies", "writes"),
    [
        ("GET", len(BODY), [BODY], [BODY]),
        ("GET", len(BODY), [BODY[:4], BODY[4:]], [BODY[:4], BODY[4:]]),
        ("GET", len(LONG), [LONG], [b"", LONG]),
        ("GET", 0, [b""], [b""]),
        ("HEAD", len(BODY), [BODY], [b""]),
    ],
    ids=["short", "in pieces", "long and not copied", "empty", "of HEAD"],
)
def test_a_body_of_known_length_is_written_with_its_head(
    method: str, length: int, bodies: list[bytes], writes: list[bytes]
) -> None:
    first, *others = answered(method, length, *bodies).writes
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n" + writes[0])
    assert others == writes[1:]


def test_the_head_of_a_stream_is_written_at_once() -> None:
    assert answered("GET", None, BODY).writes[0].endswith(b"transfer-encoding: chunked\r\n\r\n")


def test_the_head_is_written_before_the_end_where_the_application_fails() -> None:
    recorder = answered("GET", len(BODY))
    assert (len(recorder.writes), recorder.closed) == (1, True)
