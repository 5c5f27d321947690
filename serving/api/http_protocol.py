"""HTTP/1.1 on the public ports: uvicorn's protocol with limits, and without its lost answers.

A limit is checked before the bytes that it limits are stored. Data that does not become a request
(too large, too slow, not HTTP) is answered here, in the format of all errors.

Silent connections (`connections.Port`) have time limits, each by a part of its own: a timer for
the head, the paces of a body and of an answer, and lingering at the end. The longest silent one is
closed for a new one if `max_connections` are open: idle clients cannot block others.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import socket
import struct
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
from serving.api.connections import PORTS, Port
from serving.api.lingering import Lingering
from serving.api.pace import Pace, Timer, unacknowledged
from serving.errors import BadRequest, HeadersTooLarge, RequestTimeout, ServingError, Unavailable

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 65_536
# Health checks are answered at once, also while all other requests are refused.
HEALTH_PATHS = frozenset(("/ping", "/health", "/v2/health/live", "/v2/health/ready"))
# Bytes for the parser at a time: in between, the size of what it has buffered is checked.
CHUNK_BYTES = 2048
MAX_PIPELINED = 8  # requests that wait for the answers before theirs; later bytes stay unparsed
TCP_NOTSENT_LOWAT = 25  # from Linux's tcp.h
# Key in an ASGI scope, if the answer begins before the body ends. Its value is a function: since
# when, on the monotonic clock, the server waits for more of the body; None while the client may
# wait for the server.
DUPLEX = "kogpt2.duplex"
FRAMING = (b"content-length", b"transfer-encoding")


class Part(enum.Enum):
    """The part of a request that the parser is in."""

    HEAD = enum.auto()
    BODY = enum.auto()  # with a trailer, and what precedes the next head
    REPLAY = enum.auto()  # a head for a new parser, of a request whose head is known; see `_feed`


class HTTPProtocol(HttpToolsProtocol):
    """One connection of a client."""

    # Per port, so that clients of one port cannot block the other. A sixteenth is reserved for
    # silent connections and health checks.
    max_connections = 4096
    head_s = 10.0  # for a request's head to arrive, its first byte included
    # A client must send `pace_bytes` of a body in each `pace_s`, and read as many of an answer in
    # each `read_s`: what it reads shows in steps of its receive buffer, 128 kB by default.
    pace_s, read_s, pace_bytes = 10.0, 150.0, 1000
    unsent_bytes = 128 << 10  # of answers, buffered in the kernel for a client that does not read
    # Unread answers of a port in this process. Above it, clients that do not read lose theirs
    # before `read_s`. It is checked at each answer larger than `large_bytes`.
    max_unread_bytes, large_bytes = 256 << 20, 1 << 20
    linger_s, linger_bytes = 10.0, 128 << 20  # for a client that still sends when it is answered

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._port: Port | None = None
        self._answering: RequestResponseCycle | None = None  # the request passed on last
        self._head_timer = Timer()
        self._sending = Pace(self.pace_s, self.pace_bytes, self._sent, self._sends_too_slowly)
        self._reading = Pace(self.read_s, self.pace_bytes, self._read, self._reads_too_slowly)
        self._lingering = Lingering(self.linger_s, self.linger_bytes, self.abort)
        self._part = Part.BODY
        self._received = 0  # bytes
        self._unread = 0  # bytes since the last callback of the parser
        self._body_left = 0  # missing bytes of a body with a Content-Length
        self._unparsed = b""

    # A connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        port = PORTS[transport.get_extra_info("sockname")[1]]
        if len(port.open) >= self.max_connections and not port.evict_silent():
            transport.write(_error(Unavailable("too many connections")))
            transport.close()
            return
        connected: socket.socket = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # kernels other than Linux may not support it
            connected.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, self.unsent_bytes)
        super().connection_made(transport)
        self._port = port
        port.add(self)
        self._head_timer.start(self.head_s, self._too_slow)

    def abort(self) -> None:
        """Close the connection at once, and drop data that the client has not read."""
        if self.unwritten_bytes:
            connected: socket.socket = self.transport.get_extra_info("socket")
            reset = struct.pack("ii", 1, 0)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self.transport.abort()

    def _note(self) -> None:
        """Note in the port whether the server works on a request, or waits for the client.

        Call it whenever the client has sent or read, or the server begins or ends to wait for it.
        """
        cycle = self.cycle
        answering = cycle is not None and not (
            cycle.response_complete or (cycle.more_body and DUPLEX not in cycle.scope)
        )
        works = (answering or self.pipeline) and not self.flow.write_paused
        if self._port is not None:
            self._port.note(self, is_silent=not works)

    def connection_lost(self, exc: Exception | None) -> None:
        for limit in (self._head_timer, self._sending, self._reading, self._lingering):
            limit.stop()
        self._unparsed = b""
        self.pipeline.clear()
        if self._answering is not None:  # uvicorn notifies only the request that came last
            self._answering.disconnected = True
            self._answering.message_event.set()
        if self._port is not None:  # else the connection was refused as one too many
            self._port.remove(self)
            super().connection_lost(exc)

    # The pace of a client that sends a body or reads an answer

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note()
        self._reading.start()
        if self._port is not None and self.unwritten_bytes > self.large_bytes:
            self._port.limit_unread(self.max_unread_bytes)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note()

    @property
    def unwritten_bytes(self) -> int:
        """The bytes of answers that the kernel has not taken."""
        size: int = self.transport.get_write_buffer_size()
        return size

    def _owes_body(self) -> bool:
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_complete

    def _sent(self) -> int | None:
        return self._received if self._owes_body() and not self._lingering.discards else None

    def _is_awaited(self) -> bool:
        """Return whether the server has waited for the client's body for a window of its pace."""
        if self.flow.read_paused:
            return False
        waits_since: Any = self.cycle.scope.get(DUPLEX)
        if waits_since is None:
            return True
        since: float | None = waits_since()
        return since is not None and time.monotonic() - since >= self.pace_s

    def _sends_too_slowly(self) -> None:
        if not self._is_awaited():
            self._sending.start()
            return
        pace = f"{self.pace_bytes / self.pace_s:g} bytes a second"
        self._refuse(RequestTimeout(f"a body comes at {pace} at least"))

    def _read(self) -> int | None:
        unwritten = self.unwritten_bytes
        if not unwritten or not (self.flow.write_paused or self._is_answered()):
            return None  # the client waits for the server
        return -unwritten - unacknowledged(self.transport.get_extra_info("socket"))

    def _reads_too_slowly(self) -> None:
        logger.info("a client does not read its answer: its connection is ended")
        self.abort()

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # A request

    def _too_slow(self) -> None:
        if self._part is Part.HEAD:
            self._refuse(RequestTimeout(f"a request's head has {self.head_s:g} s to arrive"))
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._lingering.discards:
            self._lingering.discard(len(data))
            return
        self._unset_keepalive_if_required()
        if self._is_answered() and not self._head_timer.started:
            self._head_timer.start(self.head_s, self._too_slow)
        self._received += len(data)
        owed = self._owes_body()
        self._parse(data)
        if self._owes_body():
            self._note()
            if not owed:
                self._sending.start()

    def _parse(self, data: bytes) -> None:
        """Pass received bytes to the parser, chunk by chunk, until a limit is reached."""
        at = 0
        while at < len(data) and not self._lingering.discards and not self.transport.is_closing():
            if len(self.pipeline) >= MAX_PIPELINED:
                self._unparsed = data[at:]
                return
            chunk = data[at : at + max(self._body_left, CHUNK_BYTES)]
            at += len(chunk)
            self._unread += len(chunk)
            try:
                self._feed(chunk)
            except httptools.HttpParserError as error:
                cause = error.__context__  # raised by `_check_head`, which the parser calls
                if not isinstance(cause, ServingError):
                    cause = BadRequest("this is not HTTP/1.1")
                self._refuse(cause)
            else:
                # The parser buffers a head, a chunk's head or a trailer to its end, however long.
                if self._unread > MAX_HEADER_BYTES:
                    self._refuse(HeadersTooLarge(f"headers have at most {MAX_HEADER_BYTES} bytes"))

    def _feed(self, data: bytes) -> None:
        """Feed the parser, and ignore offers of another protocol (`Upgrade: h2c` of Java's client).

        The parser stops after a head with an offer, though the body follows in HTTP/1.1. A new
        parser continues there, as after a head without an offer.
        """
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
                self._part = Part.REPLAY
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing)
                self._part = Part.BODY
                data = b"\r\n" + data

    def on_message_begin(self) -> None:
        if self._part is not Part.REPLAY:
            self._unread, self._part = 0, Part.HEAD
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._part is Part.HEAD:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is Part.HEAD:  # else a trailer, which is dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._part is not Part.HEAD:
            return
        self._check_head()
        self._unread, self._part = 0, Part.BODY
        self._head_timer.stop()
        super().on_headers_complete()
        self._note()

    def _check_head(self) -> None:
        """Check a request's head for contents that a proxy in front may interpret differently.

        See RFC 9112, 3.2 and 6.1; the parser itself refuses lengths that contradict each other.
        Raises `BadRequest`, and `Unavailable` where too many requests are being answered.
        """
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
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self._body_left = lengths[0] if lengths else 0
        port = self._port
        most = max(self.max_connections - max(self.max_connections // 16, 1), 1)
        is_too_many = port is not None and self in port.silent and port.busy >= most
        if is_too_many and self.url.partition(b"?")[0].decode("latin-1") not in HEALTH_PATHS:
            raise Unavailable("too many requests are being answered")

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        self._body_left = max(self._body_left - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._unread = self._body_left = 0
            super().on_message_complete()
            self._note()

    # An answer

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_on(message: Any) -> None:
                if self.transport.is_closing():
                    cycle.disconnected = True  # `connection_lost` sets it a moment later
                self._prepare(cycle, message)
                join(cycle, message)
                await send(message)

            await app(scope, receive, send_on)
            if cycle.response_started and not cycle.response_complete:
                cycle.disconnected = True  # closing is the only sign of a cut-off answer
                self.abort()

        super()._start_asgi_task(cycle, answer)

    def _prepare(self, cycle: RequestResponseCycle, message: Any) -> None:
        is_old = cycle.scope["http_version"] == "1.0"
        if message["type"] == "http.response.start":
            if DUPLEX in cycle.scope:
                self._note()
            elif cycle.more_body:  # bytes that still arrive are of this body, not a new request
                cycle.keep_alive = False
            if is_old:  # without chunks, an answer of unknown length ends with its connection
                cycle.chunked_encoding = False
        else:
            if is_old:
                cycle.expected_content_length = len(message.get("body", b""))
            if cycle.more_body and not cycle.keep_alive and not message.get("more_body"):
                cycle.keep_alive = True  # instead of closing
                self._lingering.begin_after_answer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._reading.start()
        self._note()
        if self.cycle.response_complete:  # else a pipelined request follows
            if self._lingering.is_due:
                self._linger()
            elif self._part is Part.HEAD:
                self._unset_keepalive_if_required()
                self._head_timer.start(self.head_s, self._too_slow)
        if self._unparsed and not self.transport.is_closing():
            data, self._unparsed = self._unparsed, b""
            self._parse(data)
        if self.pipeline or self._unparsed:
            self.flow.pause_reading()

    def _linger(self) -> None:
        self._unset_keepalive_if_required()
        self._head_timer.stop()
        self._lingering.begin(self.transport)
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _refuse(self, error: ServingError) -> None:
        """Answer data that is no valid request with an error, and close the connection.

        If an earlier request is still being answered, only its answer is sent.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                self._lingering.discard_rest()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_error(error))
        self._linger()
        self._note()


def _error(error: ServingError) -> bytes:
    """Log an error, and encode it as a response that closes the connection."""
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
