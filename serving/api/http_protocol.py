"""HTTP/1.1 on the public ports: uvicorn's protocol on httptools, where that loses an answer or has
no limit.

A limit is checked before what it limits is kept. What a client sends that gets no request of its
own (too large, too slow, not HTTP) is answered here, in the shape of all errors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import uuid
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from common.one_write import join
from common.worker_protocol import REQUEST_ID
from serving.errors import BadRequest, HeadersTooLarge, RequestTimeout, ServingError, Unavailable

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 65_536
# What tells whether the server lives is answered at once and always.
HEALTH_PATHS = frozenset(("/ping", "/health", "/metrics", "/v2/health/live", "/v2/health/ready"))
FRAMING = (b"content-length", b"transfer-encoding")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TCP_CLOSED = 7  # TCP_CLOSE of Linux's tcp_states.h, the first byte of TCP_INFO


class HTTPProtocol(HttpToolsProtocol):
    """One connection of a client."""

    max_connections = 4096  # of both ports; the one that has waited longest for a request goes
    head_s = 10.0  # for a request's head to arrive, its first byte included
    # A client that still sends when it is answered would lose the answer to a reset: what it sends
    # is read and thrown away until it stops, within these (nginx calls it a lingering close).
    linger_s = 10.0
    linger_bytes = 128 << 20
    # A client that has closed its sending half reads on or has gone, which only writing to it
    # tells. One that gets its answer meanwhile is not bothered.
    half_closed_s = 0.25

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waiting_since: float | None = None  # for a request's head
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes since the parser last told of something
        self._in_head = self._is_replay = False
        self._lingers = self._lingering = False
        self._half_closed = False

    # A connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections and not self._make_room():
            transport.write(_error(Unavailable("too many connections")))
            transport.close()
            return
        super().connection_made(transport)
        self.waiting_since = time.monotonic()
        self._start_timer(self.head_s, self._too_slow)

    def _make_room(self) -> bool:
        """Ends the connection that has waited for a request for longest; says if there was one."""
        others: list[Any] = list(self.connections)
        waiting = [other for other in others if other.waiting_since is not None]
        if waiting:
            oldest = min(waiting, key=lambda other: other.waiting_since)
            self.connections.discard(oldest)
            oldest.transport.abort()
        return bool(waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.waiting_since = None
        if self.transport is not None:  # else it was one too many
            super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the sending half open: the request is complete and its answer due."""
        cycle = self.cycle
        if self._lingering or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._start_timer(self.half_closed_s, self._probe)
        return True

    def _probe(self, asked: bool = False) -> None:
        """Ends a connection whose client has gone: its kernel answers anything with a reset."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        told: socket.socket = self.transport.get_extra_info("socket")
        if told.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSED:
            self.transport.abort()
            return
        if not asked and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)  # may precede every answer of HTTP/1.1
        self._start_timer(self.half_closed_s, self._probe, True)

    def _start_timer(self, seconds: float, act: Any, *arguments: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, act, *arguments)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # A request

    def _too_slow(self) -> None:
        if self._in_head:
            self._refuse(RequestTimeout(f"a request's head has {self.head_s:g} s to arrive"))
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        if self._lingering:
            if self._unread > self.linger_bytes:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self.waiting_since is not None and self._timer is None:
            self._start_timer(self.head_s, self._too_slow)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            said = error.__context__  # of `_check_head`
            if not isinstance(said, BadRequest):
                said = BadRequest("this is not HTTP/1.1")
            self._refuse(said)
        else:
            # The parser keeps a head, a chunk's or a trailer to its end, however long.
            if self._unread > MAX_HEADER_BYTES:
                self._refuse(HeadersTooLarge(f"headers have at most {MAX_HEADER_BYTES} bytes"))

    def _feed(self, data: bytes) -> None:
        """A client that offers another protocol (`Upgrade: h2c` of Java's client) sends its body in
        this one. The parser stops before it, and another goes on as after a head without offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                framing = b"".join(
                    b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in FRAMING
                )
                self.parser = httptools.HttpRequestParser(self)
                self._is_replay = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing)
                self._is_replay = False
                data = b"\r\n" + data

    def on_message_begin(self) -> None:
        if not self._is_replay:
            self._unread, self._in_head = 0, True
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._in_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, for nobody
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._in_head:
            return
        self._check_head()
        self._unread, self._in_head, self.waiting_since = 0, False, None
        self._stop_timer()
        super().on_headers_complete()

    def _check_head(self) -> None:
        """Raises `BadRequest` for what a proxy in front may have read otherwise (RFC 9112, 3.2 and
        6.1); the parser itself refuses lengths that contradict each other."""
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            raise BadRequest(f"this is HTTP/{version}, must be HTTP/1.1")
        if names.count(b"host") > 1:
            raise BadRequest("there is more than one Host")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings:
            chunked = len(codings) == 1 and codings[0].strip().lower() == b"chunked"
            if not chunked or version != "1.1":
                raise BadRequest("Transfer-Encoding can only be chunked, in HTTP/1.1")

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._unread = 0
            super().on_message_complete()

    # An answer

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_on(message: Any) -> None:
                self._prepare(cycle, message)
                join(cycle, message)
                await send(message)

            await app(scope, receive, send_on)

        super()._start_asgi_task(cycle, answer)

    def _prepare(self, cycle: RequestResponseCycle, message: Any) -> None:
        is_old = cycle.scope["http_version"] == "1.0"
        if message["type"] == "http.response.start":
            if cycle.more_body:  # what comes of it is no further request
                cycle.keep_alive = False
            if is_old:  # knows no chunks: an answer of unknown length ends with its connection
                cycle.chunked_encoding = False
        else:
            if is_old:
                cycle.expected_content_length = len(message.get("body", b""))
            if cycle.more_body and not cycle.keep_alive and not message.get("more_body"):
                self._lingers = cycle.keep_alive = True  # instead of closing

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else one more has come behind it
            self.waiting_since = time.monotonic()
            if self._lingers:
                self._linger()
            elif self._half_closed:
                self.transport.close()
            elif self._in_head:
                self._unset_keepalive_if_required()
                self._start_timer(self.head_s, self._too_slow)

    def _linger(self) -> None:
        self._lingering, self._unread = True, 0
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._start_timer(self.linger_s, self.transport.abort)

    def _refuse(self, error: ServingError) -> None:
        """Answers what has become no request, after the one before it."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive, self._lingering = False, True
                return
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_error(error))
        self.waiting_since = time.monotonic()
        self._linger()


def _error(error: ServingError) -> bytes:
    """An answer in the shape of all errors."""
    request_id = str(uuid.uuid4())
    fields = {"request_id": request_id, "status": error.status}
    logger.info("no request: %s", error.message, extra={"fields": fields})
    body = json.dumps(error.to_body()).encode()
    headers = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        REQUEST_ID: request_id,
    }
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{error.retry_after_s:.0f}"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body
