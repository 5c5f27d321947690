"""An HTTP/1.1 client on unix sockets for asyncio, for Multi Model Server and the engine.

Bodies have a length or are chunked. There are no encodings, redirects or cookies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping

import httptools

# How long an idle connection can be reused. The engine closes idle connections after five seconds:
# with a larger value, requests fail on connections that are being closed.
MAX_IDLE_S = 4.0
MAX_HEADER_BYTES = 65_536
# Bytes of a response that are buffered before the sender is paused.
UNREAD_BYTES = 65_536
# Bodies up to this size are copied behind their heads, so that both are one write.
JOINED_BYTES = 65_536
IDEMPOTENT = ("GET", "PUT", "DELETE")

Headers = Mapping[str, str]


class UnixHTTP:
    """An HTTP client for one event loop, with a connection for each concurrent request."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: deque[_Connection] = deque()

    async def request(
        self, method: str, target: str, timeout_s: float, headers: Headers, body: bytes | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the response's status, headers by lower-case names, and body.

        Raises `OSError` if there is no complete response, and `asyncio.TimeoutError`.
        """
        async with self.stream(method, target, timeout_s, headers, body, whole=True) as answer:
            return answer.status, answer.headers, b"".join(answer.chunks)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        timeout_s: float,
        headers: Headers,
        body: bytes | None,
        whole: bool = False,
    ) -> AsyncIterator[_Connection]:
        """Yield the response once its head has arrived; with `whole`, once all of it has.

        It has `status`, `headers` and `chunk()`. Raises as `request` does; leaving the block early
        closes the connection.
        """
        request = _head(method, target, headers, body)
        while True:
            connection = self._reusable()
            fresh = connection is None
            if connection is None:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_unix_connection(_Connection, self._path)
            try:
                await connection.send(request, body or b"", timeout_s, whole)
                break
            except BaseException as error:
                connection.release()
                closed = isinstance(error, ConnectionError) and not connection.status
                if fresh or not closed or method not in IDEMPOTENT:
                    raise
        try:
            yield connection
        finally:
            if connection.release():
                self._idle.append(connection)

    def _reusable(self) -> _Connection | None:
        """Return an idle connection or None; closes those that were idle for too long."""
        oldest = time.monotonic() - MAX_IDLE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
        return None

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()


def _head(method: str, target: str, headers: Headers, body: bytes | None) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: localhost"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    if not all(map(str.isprintable, lines)):
        raise ValueError("a line of a request's head cannot be sent")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Connection(asyncio.Protocol):
    """A connection with one request at a time. The parser calls the methods `on_...`."""

    status: int  # 0 until a response has begun
    headers: dict[str, str]
    chunks: list[bytes]  # received parts of the body that were not read yet

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parser: httptools.HttpResponseParser | None = None  # None: no request
        self.is_closed = False
        self.idle_since = 0.0

    # For the client

    async def send(self, head: bytes, body: bytes, timeout_s: float, whole: bool) -> None:
        """Send a request and wait for the response's head; with `whole`, for all of it."""
        self._parser = httptools.HttpResponseParser(self)
        self._whole, self._has_head, self._complete, self._paused = whole, False, False, False
        self._error: Exception | None = None
        self.status, self.headers, self.chunks = 0, {}, []
        self._header_bytes = self._unread = 0
        if self.is_closed:
            raise ConnectionResetError("the connection was closed")
        self._timer = self._loop.call_later(timeout_s, self._fail, asyncio.TimeoutError())
        # Each write is sent at once, so the receiver of a short request should wake only once.
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        while not (self._complete or (self._has_head and not whole)):
            await self._change()

    async def chunk(self) -> bytes:
        """Wait for more of the body and return all that has arrived; b"" at the end."""
        while not self.chunks and not self._complete:
            await self._change()
        chunk = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        self.chunks, self._unread = [], 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return chunk

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._woken = self._loop.create_future()
        await self._woken

    def release(self) -> bool:
        """End a request; returns whether the connection can be reused, else it is closed."""
        reusable = self._complete and self._keeps_alive and not self.is_closed
        self._parser = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if reusable:
            if self._paused:
                self._transport.resume_reading()
            self.idle_since = time.monotonic()
        else:
            self.close()
        return reusable

    def close(self) -> None:
        self.is_closed = True
        self._transport.abort()

    # For the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._fail(ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._complete:
            self.close()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ConnectionError("the answer is not HTTP"))
            return
        if self._complete or (not self._whole and (self.chunks or self._has_head)):
            self._wake()

    def _fail(self, error: Exception) -> None:
        if self._parser is not None and not self._complete:
            self._error = self._error or error
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # For the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:
            return  # trailers are ignored
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("an answer's headers are too long")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._has_head = status >= 200  # 1xx: the final response follows
        self.status = status if self._has_head else 0
        if not self._has_head:
            self.headers = {}

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)
        self._unread += len(body)
        if not self._whole and self._unread > UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._complete, self._keeps_alive = self._has_head, self._parser.should_keep_alive()
