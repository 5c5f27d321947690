"""HTTP/1.1 as the public ports send and receive it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from serving.api import http_protocol
from serving.api.http_protocol import HEALTH_PATHS, MAX_PIPELINED, HTTPProtocol
from tests.e2e.server import eventually
from tests.serving import virtual_time

LARGE = b"x" * 200_000
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
BODY = '{"inputs": "나 보기가 역겨워"}'.encode()
CHUNKED = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (BODY[:7], BODY[7:])) + b"0\r\n\r\n"


class Served:
    """A small application behind the protocol, on a port of its own."""

    def __init__(self, **limits: Any) -> None:
        self.gone, self.go_on = threading.Event(), threading.Event()
        self.begun = threading.Event()
        self.made = 0  # large answers, and pieces of the endless one
        self.windows = 0  # of a body of `/duplex`
        self.waits_since: float | None = None
        routes = [
            Route("/large", self._large),
            Route("/endless", self._endless),
            Route("/ping", lambda request: Response(b"pong")),
            Route("/echo", self._echo, methods=["POST", "GET"]),
            Route("/refuse", lambda request: JSONResponse({"code": 413}, 413), methods=["POST"]),
            Route("/stream", lambda request: StreamingResponse(iter([b"a" * 10, b"b" * 10]))),
            Route("/name/{name:path}", lambda request: Response(request.path_params["name"])),
            Route("/duplex", self._duplex, methods=["POST"]),
            Route("/wait", self._wait, methods=["POST", "GET"]),
        ]
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=4096) for _ in range(2)]
        self.port, self.other_port = (listener.getsockname()[1] for listener in listeners)
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=routes),
                http=type("Limited", (HTTPProtocol,), limits),
                ws="none",
                lifespan="off",
                log_config=None,
                loop="uvloop",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=(listeners,))

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._server.should_exit = True
        self._thread.join(60)

    @staticmethod
    async def _echo(request: Request) -> Response:
        return Response(await request.body(), headers={"x-trailer": str("x-t" in request.headers)})

    async def _duplex(self, request: Request) -> Response:
        class Echo(StreamingResponse):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                await self.stream_response(send)  # only `request` receives

        request.scope[http_protocol.DUPLEX] = self._waits_since
        return Echo(request.stream())

    def _waits_since(self) -> float | None:
        """The server computes for three windows of the body's pace, then waits for the client."""
        self.windows += 1
        if self.windows == 4:
            self.waits_since = time.monotonic()
        return self.waits_since

    async def _large(self, request: Request) -> Response:
        self.made += 1
        return Response(LARGE * int(request.query_params.get("times", 1)))

    async def _endless(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    self.made += 1
                    yield LARGE
                    await asyncio.sleep(0)
            finally:
                self.gone.set()

        return StreamingResponse(pieces())

    @property
    def connections(self) -> http_protocol.Port:
        """Those of the first port."""
        return http_protocol.PORTS[self.port]

    async def _wait(self, request: Request) -> Response:
        await request.body()
        self.begun.set()
        answered = asyncio.ensure_future(asyncio.to_thread(self.go_on.wait, 30))
        disconnected = asyncio.ensure_future(request.receive())
        await asyncio.wait({answered, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if disconnected.done():
            self.gone.set()
            self.go_on.set()
        return Response(b"done")

    def connect(
        self, port: int = 0, *, reads_little: bool = False, buffer_bytes: int = 0
    ) -> socket.socket:
        client = socket.socket()
        if reads_little:
            buffer_bytes = 4096
        if buffer_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.settimeout(60)
        client.connect(("127.0.0.1", port or self.port))
        return client

    def ask(self, *pieces: bytes) -> bytes:
        """All that comes back until the server closes."""
        with self.connect() as client:
            for piece in pieces:
                client.sendall(piece)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return read_all(client)


def read_all(client: socket.socket) -> bytes:
    answer = b""
    while piece := client.recv(65_536):
        answer += piece
    return answer


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as running:
        yield running


def post(path: str, headers: bytes = b"", length: int | None = len(BODY)) -> bytes:
    framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    return b"POST %s HTTP/1.1\r\nHost: a\r\n%s%s\r\n\r\n" % (path.encode(), headers, framing)


CHUNKS = post("/echo", length=None)  # the head of a body in chunks
LAST = b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("length", [len(BODY), None], ids=["length", "chunked"])
def test_a_request_that_offers_another_protocol_is_answered_in_http1_with_its_body(
    served: Served, length: int | None
) -> None:
    one = post("/echo", OFFER, length) + (CHUNKED if length is None else BODY)
    sent = one + one + b"GET /echo HTTP/1.1\r\nHost: a\r\n" + OFFER + b"\r\n" + LAST
    for size in (1, 3, 50, 10_000):
        answer = served.ask(*(sent[i : i + size] for i in range(0, len(sent), size)))
        assert answer.count(b"HTTP/1.1 200") == 4
        assert answer.count(BODY) == 2
        assert answer.count(b"content-length: 0") == 2
    offer = b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n"
    assert served.ask(post("/echo", offer), BODY).endswith(BODY)


def test_curl_may_offer_http2(served: Served, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if (
        curl is None
        or "HTTP2" not in subprocess.run([curl, "-V"], capture_output=True).stdout.decode()
    ):
        pytest.skip("no curl with HTTP/2")
    big = tmp_path / "body"
    big.write_bytes(BODY * 10_000)
    url = f"http://127.0.0.1:{served.port}/echo"
    for more in ([], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect: 100-continue"]):
        command = [curl, "-s", "--http2", "--data-binary", f"@{big}", *more, url, url]
        done = subprocess.run(command, capture_output=True, timeout=30, check=True)
        assert done.stdout == BODY * 20_000


# The end of a connection


def test_an_answer_before_the_body_reaches_a_client_that_sends_it_all(served: Served) -> None:
    for headers in ({}, {"Connection": "close"}) * 2:
        client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        client.request("POST", "/refuse", b"x" * 7_340_000, headers)
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())) == (413, {"code": 413})
        client.close()


def test_a_client_that_never_stops_sending_is_cut_off() -> None:
    with Served(linger_bytes=1_000_000) as served, served.connect() as client:
        client.sendall(post("/refuse", length=10**12))
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
            for _ in range(10_000):
                client.sendall(b"x" * 65_536)
    with Served(linger_s=0.2) as served, served.connect() as client:
        client.sendall(post("/refuse", length=10**12))
        assert b" 413 " in read_all(client)  # and its end, though nothing more is sent


def test_who_waits_to_be_told_to_continue_sends_its_next_request_elsewhere(served: Served) -> None:
    answer = served.ask(post("/refuse", b"Expect: 100-continue\r\n"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("half", [False, True], ids=["whole", "sending-half"])
def test_a_client_that_has_closed_is_noticed(
    served: Served, caplog: pytest.LogCaptureFixture, half: bool, requests: int
) -> None:
    with served.connect() as client:
        client.sendall((post("/wait") + BODY) * requests)
        assert served.begun.wait(60)
        if half:
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        assert served.gone.wait(60)
    eventually(lambda: not served.connections.open)
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


def test_a_client_that_ends_in_the_middle_of_its_body_is_gone(served: Served) -> None:
    with served.connect() as client:
        client.sendall(post("/echo") + BODY[:5])
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


def test_http_1_0_gets_no_chunks(served: Served) -> None:
    answer = served.ask(b"GET /stream HTTP/1.0\r\n\r\n")
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"\r\n\r\n" + b"a" * 10 + b"b" * 10)
    assert b"content-length: 0" in served.ask(b"GET /echo HTTP/1.0\r\n\r\n")
    assert b"transfer-encoding: chunked" in served.ask(LAST.replace(b"/echo", b"/stream"))


# Limits


def told(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert re.search(rb"x-request-id: [0-9a-f-]{36}", head)
    said = json.loads(body)
    assert set(said) == {"code", "type", "message"}
    return int(head.split()[1]), said["type"]


# What the parser would keep: what stands before it, what is repeated, and the end.
ENDLESS = {
    "header": (b"GET /echo HTTP/1.1\r\nX-A: ", b"a", b"\r\n\r\n"),
    "path": (b"GET /", b"a", b" HTTP/1.1\r\n\r\n"),
    "empty-lines": (b"", b"\r\n", LAST),
    "headers": (b"GET /echo HTTP/1.1\r\n", b"X-A: b\r\n", b"\r\n"),
    "chunk": (CHUNKS + b"1;", b"a", b"\r\na\r\n0\r\n\r\n"),
    "second-chunk": (CHUNKS + b"1\r\na\r\n1;", b"a", b"\r\na\r\n0\r\n\r\n"),
    "trailer": (CHUNKS + b"1\r\na\r\n0\r\nX-T: ", b"a", b"\r\n\r\n"),
    "trailers": (CHUNKS + b"1\r\na\r\n0\r\n", b"X-T: b\r\n", b"\r\n"),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_what_the_parser_would_keep_is_bounded(served: Served, case: str) -> None:
    beginning, endless, end = ENDLESS[case]
    never_ends = [beginning, *[endless * (10_000 // len(endless))] * 40]
    too_long = [beginning + endless * (70_000 // len(endless)) + end]
    for pieces in (never_ends, too_long):
        with served.connect() as client:
            with contextlib.suppress(OSError):
                for piece in pieces:
                    client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
            assert told(read_all(client)) == (431, "RequestHeaderFieldsTooLargeException")


def test_trailers_are_no_headers(served: Served) -> None:
    close = b"Connection: close\r\n"
    answer = served.ask(post("/echo", close, None) + CHUNKED[:-2] + b"X-T: 1\r\n\r\n")
    assert answer.endswith(BODY)
    assert b"x-trailer: False" in answer


def test_garbage_behind_a_request_does_not_cost_its_answer(served: Served) -> None:
    with served.connect() as client:
        client.sendall(post("/wait") + BODY + b"\x16\x03\x01 garbage\r\n\r\n")
        assert served.begun.wait(60)
        served.go_on.set()
        assert read_all(client).endswith(b"done")


def test_a_head_has_a_time_to_arrive() -> None:
    with Served(head_s=0.2) as served:
        assert served.ask() == b""
        assert told(served.ask(b"GET /ec")) == (408, "RequestTimeoutException")
        with served.connect() as client:  # also after a first request
            client.sendall(b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\nGE")
            assert b"HTTP/1.1 408" in read_all(client)


def test_of_too_many_connections_the_one_that_waited_longest_goes() -> None:
    with (
        Served(max_connections=3, head_s=60) as served,
        served.connect() as busy,
        served.connect() as slow,
        served.connect() as slower,
    ):
        busy.sendall(post("/wait") + BODY)
        assert served.begun.wait(60)
        slow.sendall(b"GET /echo HTTP/1.1\r\nX")
        assert served.ask(LAST).startswith(b"HTTP/1.1 200")
        assert read_all(slow) == b""
        slower.sendall(LAST)
        assert read_all(slower).startswith(b"HTTP/1.1 200")
        served.go_on.set()
        assert b"done" in busy.recv(65_536)


def test_where_all_connections_are_busy_one_more_is_told_to_come_back() -> None:
    with Served(max_connections=1) as served, served.connect() as busy:
        busy.sendall(post("/wait") + BODY)
        assert served.begun.wait(60)
        with served.connect() as client:
            answer = read_all(client)
        assert told(answer) == (503, "ServiceUnavailableException")
        assert b"retry-after: 1\r\n" in answer


def test_a_client_that_sends_and_reads_at_once_is_not_silent() -> None:
    with Served(max_connections=1) as served, served.connect() as busy:
        busy.sendall(post("/duplex", length=None) + b"3\r\nabc\r\n")
        answer = b""
        while b"abc" not in answer:
            answer += busy.recv(65_536)
        with served.connect() as client:
            assert told(read_all(client)) == (503, "ServiceUnavailableException")
        busy.sendall(b"3\r\ndef\r\n0\r\n\r\n" + LAST)  # and its connection stays
        answer = read_all(busy)
        assert b"def" in answer
        assert b"HTTP/1.1 200" in answer


def test_a_client_that_may_wait_for_an_answer_owes_no_body() -> None:
    with Served(pace_s=0.05) as served, served.connect() as client:
        client.sendall(post("/duplex", length=None) + b"3\r\nabc\r\n")
        answer = read_all(client)  # until the server has waited for a whole window
        assert b"abc" in answer
        assert not answer.endswith(b"0\r\n\r\n")
        assert served.windows >= 5


def is_reset(client: socket.socket) -> bool:
    """Reads to the end."""
    try:
        return read_all(client) == b""
    except ConnectionError:
        return True


GET_LARGE = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"
# What a client sends that then neither sends nor reads anything.
STALLS = {
    "pipelines": GET_LARGE * 400,
    "reads-no-stream": GET_LARGE.replace(b"large", b"endless"),
    "closes-unread": GET_LARGE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    "sends-no-body": post("/echo"),
    "sends-half-a-body": post("/echo") + BODY[:5],
    "sends-no-chunks": post("/echo", length=None),
    "sends-no-head": b"GET /ec",
}


@pytest.mark.parametrize("stall", STALLS)
def test_clients_that_stall_make_room_for_others(stall: str) -> None:
    with (
        Served(max_connections=20, head_s=60, pace_s=60, linger_s=60) as served,
        contextlib.ExitStack() as opened,
    ):
        clients = [opened.enter_context(served.connect(reads_little=True)) for _ in range(20)]
        begins_answers = b"GET /large" in STALLS[stall] or b"endless" in STALLS[stall]
        for i, client in enumerate(clients):
            client.sendall(STALLS[stall])
            if begins_answers:  # one at a time: of 20 that are busy at once the last gets a 503
                eventually(lambda i=i: served.made > i and len(served.connections.silent) == 20)
        eventually(lambda: len(served.connections.silent) == 20)
        for _ in range(30):
            assert served.ask(LAST).startswith(b"HTTP/1.1 200")
        assert len(served.connections.open) <= 20
        # Which client has been silent for longest is known to the server only: the kernel may have
        # taken more of an answer meanwhile.
        kept = {c.transport.get_extra_info("peername") for c in list(served.connections.open)}
        ended = [client for client in clients if client.getsockname() not in kept]
        assert ended
        assert all(is_reset(client) for client in ended)


def test_clients_that_stall_are_cut_off() -> None:
    with (
        Served(head_s=0.2, pace_s=0.2, read_s=0.2, linger_s=0.2) as served,
        contextlib.ExitStack() as opened,
    ):
        clients = [opened.enter_context(served.connect(reads_little=True)) for _ in STALLS]
        for client, sent in zip(clients, STALLS.values(), strict=True):
            client.sendall(sent)
        for client, stall in zip(clients, STALLS, strict=True):
            if stall.startswith("sends"):
                assert told(read_all(client)) == (408, "RequestTimeoutException"), stall
        eventually(lambda: not served.connections.open)
        assert served.gone.wait(60)


@pytest.mark.parametrize("bytes_per_s", [1000, 10_000])
def test_a_client_may_read_slowly_however_large_the_kernels_steps_are(bytes_per_s: int) -> None:
    """What it reads in `read_s` shows, though the kernel's step and asyncio's are a minute's.

    Its buffer is Linux's default of 128 KiB, which this setting doubles to; without it the kernel
    makes the buffer larger for a client that reads as fast as this test.
    """
    left = 40 * len(LARGE)

    def read(size: int) -> None:
        nonlocal left
        for _ in range(size):
            if min(size, left) <= 0:
                return
            count = len(client.recv(size))
            assert count, "the connection was ended"
            size, left = size - count, left - count

    with Served() as served, served.connect(buffer_bytes=65_536) as client:
        client.sendall(GET_LARGE.replace(b"large", b"large?times=40"))
        eventually(lambda: any(p.unwritten_bytes for p in list(served.connections.open)))
        [protocol] = served.connections.open
        per_window = int(protocol.read_s) * bytes_per_s
        for windows in range(left // per_window + 1):
            if (before := protocol._read()) is None:  # the kernel has the rest
                assert windows
                break
            read(per_window)
            eventually(
                lambda before=before: (
                    (after := protocol._read()) is None or after - before >= protocol.pace_bytes
                )
            )
        read(left)
        eventually(lambda: not protocol.unwritten_bytes)


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    answer = "봄비가 내린다. ".encode() * 20_000

    async def test() -> None:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            Starlette(routes=[Route("/", lambda request: Response(answer))]),
            lifespan="off",
            log_config=None,
        )
        config.load()
        server = await loop.create_server(
            lambda: HTTPProtocol(config=config, server_state=ServerState(), app_state={}),
            "127.0.0.1",
        )
        with server.sockets[0].dup() as listener, socket.socket() as client:
            client.connect(listener.getsockname())
            client.sendall(LAST.replace(b"/echo", b"/"))
            connections = http_protocol.PORTS[listener.getsockname()[1]]
            for _ in range(1000):
                if any(protocol.unwritten_bytes for protocol in connections.open):
                    break  # the kernel's buffers are full
                await asyncio.to_thread(time.sleep, 0)
            await asyncio.sleep(HTTPProtocol.read_s - 1)
            assert connections.open
            # Twice: the kernel may have taken more in the first.
            await asyncio.sleep(2 * HTTPProtocol.read_s)
            assert not connections.open
        server.close()

    virtual_time.run(test)


def test_unread_answers_of_all_clients_together_are_bounded() -> None:
    with (
        Served(max_unread_bytes=4_000_000, large_bytes=100_000) as served,
        contextlib.ExitStack() as opened,
    ):
        clients = [opened.enter_context(served.connect(reads_little=True)) for _ in range(20)]
        for i, client in enumerate(clients):
            client.sendall(GET_LARGE.replace(b"large", b"large?times=5"))
            eventually(
                lambda i=i: (
                    served.made > i
                    and len(served.connections.silent) == len(served.connections.open)
                )
            )

        def unread() -> int:
            return sum(protocol.unwritten_bytes for protocol in list(served.connections.open))

        eventually(lambda: 3_000_000 < unread() <= 4_000_000)
        assert served.ask(LAST).startswith(b"HTTP/1.1 200")
        assert is_reset(clients[0])
        clients[-1].settimeout(60)
        assert len(clients[-1].recv(1000)) == 1000


def test_what_the_server_keeps_for_a_client_that_does_not_read_is_bounded() -> None:
    with Served() as served, served.connect(reads_little=True) as client:
        client.sendall(GET_LARGE * 400)
        eventually(lambda: served.connections.silent)
        assert served.made <= 4  # of 200 kB each; the kernel alone would take 15


def test_pipelined_requests_are_parsed_as_they_are_answered() -> None:
    lengths = set()

    def counted(self: HTTPProtocol) -> None:
        HTTPProtocol.on_headers_complete(self)
        lengths.add(len(self.pipeline))

    with Served(on_headers_complete=counted) as served:
        answer = served.ask(
            b"GET /name/%d HTTP/1.1\r\nHost: a\r\n\r\n" * 500 % (*range(500),), LAST
        )
    bodies = re.findall(rb"\r\n\r\n(\d+)", answer)
    assert bodies == [b"%d" % i for i in range(500)]
    assert max(lengths) <= MAX_PIPELINED + http_protocol.CHUNK_BYTES // 30


def test_requests_for_health_are_answered_where_no_others_are() -> None:
    with Served(max_connections=32) as served, contextlib.ExitStack() as opened:
        for _ in range(30):
            opened.enter_context(served.connect()).sendall(post("/wait") + BODY)
        eventually(lambda: served.connections.busy == 30)
        for _ in range(5):
            assert told(served.ask(LAST)) == (503, "ServiceUnavailableException")
            answer = served.ask(LAST.replace(b"/echo", b"/ping?a"))
            assert answer.endswith(b"pong")
        with served.connect(served.other_port) as client:  # management's
            client.sendall(LAST)
            assert read_all(client).startswith(b"HTTP/1.1 200")
        served.go_on.set()
    assert "/ping" in HEALTH_PATHS


def test_a_client_that_hangs_up_during_an_answer_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Served(read_s=0.2) as served:
        for path in ("endless", "large"):
            for reset in (0, 1):
                served.gone.clear()
                with served.connect(reads_little=True) as client:
                    client.sendall(GET_LARGE.replace(b"large", path.encode()))
                    client.recv(1000)
                    option = struct.pack("ii", reset, 0)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
                eventually(lambda: not served.connections.open)
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
