"""The HTTP client for unix sockets: reuse of connections, broken answers, streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from common import unix_http
from common.unix_http import UnixHTTP

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nX-Name: a\r\n\r\n\xec\x8b\x9c\xec\x9d\xb8"
POEM = (200, {"content-length": "6", "x-name": "a"}, "시인".encode())
WIDE_S = 60.0
# False: the connection is closed then.
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


class Server:
    """Answers each request by the next of `answers`, which are on as many connections as needed."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.requests = list(answers), list[bytes]()
        self.connections = self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if b"content-length" in line]
                size = int(length[0].split()[1]) if length else 0
                self.requests.append(head + await reader.readexactly(size))
                if not await self.answers.pop(0)(reader, writer):
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1


def send(*pieces: bytes, close: bool = False) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return not close

    return answer


@contextlib.asynccontextmanager
async def client_of(server: Server, folder: Path) -> AsyncIterator[UnixHTTP]:
    listening = await asyncio.start_unix_server(server.serve, str(folder / "s"))
    client = UnixHTTP(str(folder / "s"))
    try:
        yield client
    finally:
        client.close()
        listening.close()
        while server.open:
            await asyncio.sleep(0.01)


async def ask(client: UnixHTTP, method: str = "POST", timeout_s: float = WIDE_S) -> None:
    status, _, _ = await client.request(method, "/m?a=b", timeout_s, {"x-id": "1"}, b"body")
    assert status == 200


@pytest.mark.parametrize(
    "pieces",
    [
        [OK],
        [OK[i : i + 1] for i in range(len(OK))],
        [b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n", OK],
    ],
    ids=["whole", "byte by byte", "behind an informational one"],
)
async def test_an_answer_is_read(tmp_path: Path, pieces: list[bytes]) -> None:
    server = Server(send(*pieces))
    async with client_of(server, tmp_path) as client:
        body = "가".encode()
        assert await client.request("POST", "/m?a=b", WIDE_S, {"x-id": "1"}, body) == POEM
    head = b"POST /m?a=b HTTP/1.1\r\nhost: localhost\r\nx-id: 1\r\ncontent-length: 3\r\n\r\n"
    assert server.requests == [head + body]


@pytest.mark.parametrize(("max_idle_s", "connections"), [(WIDE_S, 2), (-1.0, 4)])
async def test_a_connection_is_reused_unless_it_is_closed_or_was_idle_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_idle_s: float, connections: int
) -> None:
    monkeypatch.setattr(unix_http, "MAX_IDLE_S", max_idle_s)
    closing = OK.replace(b"X-Name: a", b"connection: close")
    server = Server(send(OK), send(OK), send(closing, close=True), send(OK))
    async with client_of(server, tmp_path) as client:
        for _ in range(4):
            await ask(client)
    assert server.connections == connections


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_only_a_get_is_sent_again_where_its_reused_connection_was_closed(
    tmp_path: Path, method: str
) -> None:
    server = Server(send(OK), send(close=True), send(OK))
    async with client_of(server, tmp_path) as client:
        await ask(client)
        if method == "GET":
            await ask(client, method)
        else:
            with pytest.raises(ConnectionError):
                await ask(client, method)
    assert len(server.requests) == (3 if method == "GET" else 2)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        OK[:-1],
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"\x16\x03\x01 no HTTP",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + 70_000 * b"y" + b"\r\n\r\n",
    ],
)
async def test_a_broken_answer_is_an_error(tmp_path: Path, sent: bytes) -> None:
    async with client_of(Server(send(sent, close=True)), tmp_path) as client:
        with pytest.raises(ConnectionError):
            await ask(client)


async def test_a_request_ends_at_its_timeout_or_cancellation_and_hangs_up(tmp_path: Path) -> None:
    hung_up = asyncio.Queue[bytes]()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await hung_up.put(await reader.read())
        return False

    server = Server(silent, silent)
    async with client_of(server, tmp_path) as client:
        with pytest.raises(asyncio.TimeoutError):
            await ask(client, timeout_s=0.1)
        await hung_up.get()
        task = asyncio.create_task(ask(client))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await hung_up.get()


async def test_a_stream_is_read_as_it_comes(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    goes_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(head + b"3\r\n\xea\xb0\x80\r\n")
        await goes_on.wait()
        writer.write(b"3\r\n\xeb\x82\x98\r\n0\r\nx-trailer: 1\r\n\r\n")
        return True

    server = Server(answer, send(OK))
    async with client_of(server, tmp_path) as client:
        async with client.stream("GET", "/", WIDE_S, {}, None) as stream:
            assert stream.status == 200
            assert await stream.chunk() == "가".encode()
            goes_on.set()
            assert [await stream.chunk() for _ in range(2)] == ["나".encode(), b""]
            assert stream.headers == {"transfer-encoding": "chunked"}
        await ask(client)
    assert server.connections == 1


async def test_the_sender_of_an_unread_stream_is_held_back(tmp_path: Path) -> None:
    size, sent = 32 << 20, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16
        return True

    async with (
        client_of(Server(answer), tmp_path) as client,
        client.stream("GET", "/", WIDE_S, {}, None) as stream,
    ):
        before: Any = None
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < size // 2
        received = 0
        while chunk := await stream.chunk():
            received += len(chunk)
    assert received == size


async def test_a_header_with_a_line_break_is_not_sent(tmp_path: Path) -> None:
    async with client_of(Server(), tmp_path) as client:
        with pytest.raises(ValueError, match="cannot be sent"):
            await client.request("GET", "/", WIDE_S, {"x": "1\r\ny: 2"}, None)
