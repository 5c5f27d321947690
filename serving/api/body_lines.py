"""The lines of a request's body, which is read while its lines are used.

A client that sends its whole body before it reads an answer gets through with as many bytes as one
request may have: so many are read ahead. Beyond them, the body is read as fast as it is used. If
the client then reads no answer for `STALL_S`, as many bytes again are read ahead: a client that has
stopped altogether, such as curl in front of a pager, sends only what the kernels hold, and goes on
later. One that still sends would wait for ever, so the rest of its body is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator

from anyio import move_on_after
from starlette.requests import ClientDisconnect

from serving.api.gateway import Gateway
from serving.api.request import Request
from serving.api.request_body import LARGEST_BODIES
from serving.errors import BadRequest, BodyTooLarge

# How long a client that does not read its answer may fill up what is read ahead. Longer: clients
# that send before they read wait longer, and some give up. Shorter: clients lose lines that stop
# reading for a while and still send.
STALL_S = 30.0
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACES = b" \t\r"
BLANK = re.compile(rb"[ \t\r\n]+")  # faster than line by line, which would block the event loop


class BodyLines:
    """Splits a body at its line ends; blank lines are left out."""

    def __init__(self, gateway: Gateway, request: Request) -> None:
        self._gateway, self._request = gateway, request
        self._max_line = gateway.settings.max_request_bytes
        self._max_bodies = LARGEST_BODIES * self._max_line // 2  # the others are single requests'
        self._data = bytearray()
        self._searched = 0  # bytes of `_data` that have no line end
        self._is_first = True
        self._too_long = False  # the line that arrives is, and its bytes are dropped
        self._complete = False  # all of the body has arrived
        self._more_bytes = 0  # bytes that are read ahead beyond `_max_line`
        self._drops = False  # whether what arrives is dropped, because the client does not read
        self._refusal: BodyTooLarge | None = None  # takes the place of the first dropped line
        self._next: bytes | BodyTooLarge | None = None  # of `first`
        self._arrived, self._used = asyncio.Event(), asyncio.Event()
        self.waits_since: float | None = None  # on the monotonic clock, if the next line is awaited

    async def first(self) -> None:
        """Wait for the first line. Raises `BadRequest` without any, `ClientDisconnect`."""
        with self._waiting():
            while (line := self._cut()) is None:
                if self._complete:
                    raise BadRequest("the body has no lines, must have one JSON value a line")
                await self._receive()
        self._next = line

    async def read(self, stalls: Callable[[], bool]) -> None:
        """Read the body as far ahead as the limits allow. Raises `ClientDisconnect` at the end.

        stalls: returns whether the client has read nothing of its answer for `STALL_S`
        """
        while True:
            while self._is_full():
                if self._more_bytes and stalls():  # it has filled that, too: it still sends
                    self._drop_rest()
                    break
                self._more_bytes = 0
                self._used.clear()
                with move_on_after(STALL_S) as waiting:
                    await self._used.wait()
                if waiting.cancelled_caught and stalls():
                    self._more_bytes = self._max_line
            await self._receive()
            self._arrived.set()

    async def next(self) -> bytes | BodyTooLarge | None:
        """Return the next line, an error in place of one that is too long, None at the end."""
        if self._next is not None:
            first, self._next = self._next, None
            return first
        with self._waiting():
            while (line := self._cut()) is None:
                if self._refusal is not None:
                    refusal, self._refusal = self._refusal, None
                    return refusal
                if self._complete:
                    return None
                self._arrived.clear()
                await self._arrived.wait()
        return line

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = None

    def _drop_rest(self) -> None:
        """Drop the line that has not arrived whole, and what arrives from now on."""
        self._drops = True
        end = self._data.rfind(b"\n") + 1
        self._count(end - len(self._data))
        del self._data[end:]
        self._searched = min(self._searched, end)
        self._refusal = BodyTooLarge(
            "this line and those behind it are not answered: the client read no answer for"
            f" {STALL_S:.0f} s, with more than MAX_REQUEST_BYTES ({self._max_line}) sent ahead;"
            " read the answers while you send, or send fewer lines at once"
        )

    async def _receive(self) -> None:
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._complete = not message.get("more_body", False)
        chunk = b"" if self._drops else message.get("body", b"")
        self._data += chunk
        self._count(len(chunk))

    def _is_full(self) -> bool:
        if self._drops:
            return False
        if len(self._data) > self._max_line + self._more_bytes:
            return True
        shared = self._gateway.body_bytes > self._max_bodies
        return shared and self._data.find(b"\n", self._searched) >= 0

    def _cut(self) -> bytes | BodyTooLarge | None:
        """Remove the next line from the received data and return it; None if it is incomplete."""
        data = self._data
        if self._is_first:
            if not self._complete and BYTE_ORDER_MARK.startswith(data):
                return None
            self._is_first = False
            self._drop(len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0)
        if not self._too_long and (blank := BLANK.match(data)) is not None:
            self._drop(blank.end())
        end = data.find(b"\n", self._searched)
        if end < 0:
            end = self._searched = len(data)
            self._too_long |= end > self._max_line
            if not self._complete:
                if self._too_long:
                    self._drop(end)
                return None
            if not (data or self._too_long):
                return None
        if self._too_long or end > self._max_line:
            self._too_long = False
            self._drop(end + 1)
            return BodyTooLarge(f"the line has more than {self._max_line} bytes")
        line = bytes(data[:end]).rstrip(SPACES)
        self._drop(end + 1)
        return line

    def _drop(self, size: int) -> None:
        if size := min(size, len(self._data)):
            del self._data[:size]
            self._searched = 0
            self._count(-size)
            self._used.set()

    def _count(self, size: int) -> None:
        self._gateway.body_bytes += size
        self._request.state.body_bytes += size
