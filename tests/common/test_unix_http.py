"""The client on unix sockets, of servers that answer as they like."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from common import unix_http
from common.unix_http import UnixHTTP

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nX-Name: a\r\n\r\n\xec\x8b\x9c\xec\x9d\xb8"
WAIT_S = 60.0
T = TypeVar("T")
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


class Server:
    """Answers each request by the next of `answers`; a connection ends with the last of its own."""

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
                if await self.answers.pop(0)(reader, writer) is False:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1


def says(*pieces: bytes, ends: bool = False) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        return not ends

    return answer


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    await reader.read()
    return False


@contextlib.asynccontextmanager
async def client_of(server: Server, path: Path) -> AsyncIterator[UnixHTTP]:
    listening = await asyncio.start_unix_server(server.serve, str(path))
    client = UnixHTTP(str(path))
    try:
        yield client
    finally:
        client.close()
        listening.close()
        while server.open:
            await asyncio.sleep(0.01)


def run(tmp_path: Path, server: Server, work: Callable[[UnixHTTP], Awaitable[T]]) -> T:
    async def main() -> T:
        async with client_of(server, tmp_path / "s") as client:
            return await asyncio.wait_for(work(client), WAIT_S)

    return asyncio.run(main())


async def ask(client: UnixHTTP, method: str = "POST", timeout_s: float = WAIT_S) -> bytes:
    status, _, body = await client.request(method, "/m?a=b", timeout_s, {"x-id": "1"}, b"body")
    assert status == 200
    return body


def test_a_request_is_sent_as_it_is_and_its_answer_read_in_whatever_pieces(tmp_path: Path) -> None:
    server = Server(says(*(OK[i : i + 1] for i in range(len(OK)))))
    answer = run(
        tmp_path,
        server,
        lambda c: c.request("POST", "/m?a=b", WAIT_S, {"x-id": "1"}, "가".encode()),
    )
    assert answer == (200, {"content-length": "6", "x-name": "a"}, "시인".encode())
    assert server.requests == [
        b"POST /m?a=b HTTP/1.1\r\nhost: localhost\r\nx-id: 1\r\ncontent-length: 3\r\n\r\n"
        + "가".encode()
    ]


async def test_a_connection_is_used_again_unless_it_is_closed(tmp_path: Path) -> None:
    closing = OK.replace(b"X-Name: a", b"connection: close")
    server = Server(says(OK), says(OK), says(closing, ends=True), says(OK))

    async with client_of(server, tmp_path / "s") as client:
        for _ in range(4):
            await ask(client)
    assert server.connections == 2


async def test_a_connection_that_has_rested_too_long_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_http, "MAX_IDLE_S", -1.0)
    server = Server(says(OK), says(OK))

    async with client_of(server, tmp_path / "s") as client:
        await ask(client)
        await ask(client)
    assert server.connections == 2


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_may_be_asked_twice_is_asked_again_where_its_connection_was_just_closed(
    tmp_path: Path, method: str
) -> None:
    server = Server(says(OK), says(ends=True), says(OK))

    async with client_of(server, tmp_path / "s") as client:
        await ask(client)
        if method == "GET":
            await ask(client, method)
        else:
            with pytest.raises(ConnectionError):
                await ask(client, method)
    assert len(server.requests) == (3 if method == "GET" else 2)


@pytest.mark.parametrize(
    "told",
    [
        b"",
        OK[:-1],
        b"HTTP/1.1 200 OK\r\n\r\nno length",
        b"\x16\x03\x01 no HTTP",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + 70_000 * b"y" + b"\r\n\r\n",
    ],
)
async def test_a_broken_answer_is_none(tmp_path: Path, told: bytes) -> None:
    async with client_of(Server(says(told, ends=True)), tmp_path / "s") as client:
        with pytest.raises(ConnectionError):
            await ask(client)


def test_an_answer_may_come_behind_another_that_is_none(tmp_path: Path) -> None:
    server = Server(says(b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n", OK))
    answer = run(tmp_path, server, lambda c: c.request("POST", "/", WAIT_S, {}, b""))
    assert answer == (200, {"content-length": "6", "x-name": "a"}, "시인".encode())


async def test_silence_is_not_waited_for(tmp_path: Path) -> None:
    async with client_of(Server(silent), tmp_path / "s") as client:
        with pytest.raises(asyncio.TimeoutError):
            await ask(client, timeout_s=0.1)


async def test_who_is_cancelled_hangs_up(tmp_path: Path) -> None:
    hung_up = asyncio.Event()

    async def watching(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await reader.read()
        hung_up.set()
        return False

    server = Server(watching)

    async with client_of(server, tmp_path / "s") as client:
        task = asyncio.create_task(ask(client))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await hung_up.wait()


async def test_a_stream_is_read_as_it_comes(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    goes_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(head + b"3\r\n\xea\xb0\x80\r\n")
        await goes_on.wait()
        writer.write(b"3\r\n\xeb\x82\x98\r\n0\r\nx-trailer: 1\r\n\r\n")
        return True

    server = Server(answer, says(OK))

    async with client_of(server, tmp_path / "s") as client:
        async with client.stream("GET", "/", WAIT_S, {}, None) as told:
            assert told.status == 200
            assert await told.piece() == "가".encode()
            goes_on.set()
            assert await told.piece() == "나".encode()
            assert await told.piece() == b""
            assert told.headers == {"transfer-encoding": "chunked"}
        await ask(client)
    assert server.connections == 1


def test_the_sender_of_a_stream_that_nobody_reads_waits_for_its_reader(tmp_path: Path) -> None:
    size, sent = 32 << 20, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16
        return True

    async def work(client: UnixHTTP) -> int:
        async with client.stream("GET", "/", WAIT_S, {}, None) as told:
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.2)
            assert sent < size // 2
            got = 0
            while piece := await told.piece():
                got += len(piece)
            return got

    assert run(tmp_path, Server(answer), work) == size


async def test_a_line_that_would_end_early_is_not_sent(tmp_path: Path) -> None:
    async with client_of(Server(), tmp_path / "s") as client:
        with pytest.raises(ValueError, match="cannot be sent"):
            await client.request("GET", "/", WAIT_S, {"x": "1\r\ny: 2"}, None)
