"""HTTP/1.1 on a unix socket, for asyncio: as much of it as Multi Model Server and the engine speak.

Bodies have a length or come in chunks; nothing is decoded, followed or remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping

import httptools

# The engine closes what has rested for five seconds; nobody asks on a connection that is closing.
RESTS_S = 4.0
MAX_HEADER_BYTES = 65_536
# Of a stream that nobody reads; its sender waits then.
UNREAD_BYTES = 65_536
# A request is copied into one piece up to here.
TOGETHER_BYTES = 65_536
IDEMPOTENT = ("GET", "PUT", "DELETE")

Headers = Mapping[str, str]


class UnixHTTP:
    """A client with as many connections as there are requests at once. One event loop's."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._resting: deque[_Connection] = deque()

    async def ask(
        self, method: str, target: str, timeout_s: float, headers: Headers, body: bytes | None
    ) -> tuple[int, dict[str, str], bytes]:
        """The answer's status, headers by their names in lower case, and body.

        Raises `OSError` where there is none, also a broken one, and `asyncio.TimeoutError`.
        """
        async with self.stream(method, target, timeout_s, headers, body, whole=True) as answer:
            return answer.status, answer.headers, b"".join(answer.pieces)

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
        """The answer as soon as its head is there (`status`, `headers`, `piece`), or when it is
        `whole`. Raises as `ask` does; leaving it early ends it."""
        request = _head(method, target, headers, body)
        while True:
            connection = self._rested()
            fresh = connection is None
            if connection is None:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_unix_connection(_Connection, self._path)
            try:
                await connection.ask(request, body or b"", timeout_s, whole)
                break
            except BaseException as error:
                connection.leave()
                closed = isinstance(error, ConnectionError) and not connection.status
                if fresh or not closed or method not in IDEMPOTENT:
                    raise
        try:
            yield connection
        finally:
            if connection.leave():
                self._resting.append(connection)

    def _rested(self) -> _Connection | None:
        """One that has rested shortly; ends those that have for too long."""
        oldest = time.monotonic() - RESTS_S
        while self._resting and self._resting[0].rests_since < oldest:
            self._resting.popleft().close()
        while self._resting:
            connection = self._resting.pop()
            if not connection.is_closed:
                return connection
        return None

    def close(self) -> None:
        """Ends what rests."""
        while self._resting:
            self._resting.pop().close()


def _head(method: str, target: str, headers: Headers, body: bytes | None) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: localhost"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    if not all(map(str.isprintable, lines)):
        raise ValueError("a line of a request's head cannot be sent")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Connection(asyncio.Protocol):
    """Asks one thing at a time. The parser calls what begins with `on_`."""

    status: int  # 0 as long as no answer has begun
    headers: dict[str, str]
    pieces: list[bytes]  # of the body, that were not read yet

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parser: httptools.HttpResponseParser | None = None  # None: nothing is asked
        self.is_closed = False
        self.rests_since = 0.0

    # For whoever asks

    async def ask(self, head: bytes, body: bytes, timeout_s: float, whole: bool) -> None:
        """Until the answer's head is there, or all of it is."""
        self._parser = httptools.HttpResponseParser(self)
        self._whole, self._has_head, self._complete, self._paused = whole, False, False, False
        self._error: Exception | None = None
        self.status, self.headers, self.pieces = 0, {}, []
        self._header_bytes = self._unread = 0
        if self.is_closed:
            raise ConnectionResetError("the connection was closed")
        self._timer = self._loop.call_later(timeout_s, self._fail, asyncio.TimeoutError())
        # Each write is sent at once: of a short request the other side shall wake once.
        if len(body) <= TOGETHER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        while not (self._complete or (self._has_head and not whole)):
            await self._change()

    async def piece(self) -> bytes:
        """What has come of the body since it was last read, as soon as there is some; b"" at the
        end."""
        while not self.pieces and not self._complete:
            await self._change()
        piece = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces, self._unread = [], 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return piece

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._woken = self._loop.create_future()
        await self._woken

    def leave(self) -> bool:
        """Whether more can be asked here; otherwise it is closed."""
        rests = self._complete and self._may_rest and not self.is_closed
        self._parser = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if rests:
            if self._paused:
                self._transport.resume_reading()
            self.rests_since = time.monotonic()
        else:
            self.close()
        return rests

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
            self.close()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ConnectionError("the answer is not HTTP"))
            return
        if self._complete or (not self._whole and (self.pieces or self._has_head)):
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
            return  # a trailer
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("an answer's headers are too long")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._has_head = status >= 200  # else the answer comes behind it
        self.status = status if self._has_head else 0
        if not self._has_head:
            self.headers = {}

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self._unread += len(body)
        if not self._whole and self._unread > UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._complete, self._may_rest = self._has_head, self._parser.should_keep_alive()
