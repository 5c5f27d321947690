"""The lines of a request's body, which is read while its lines are used.

A client that sends its whole body before it reads an answer gets through with as many bytes as one
request may have: so many are read ahead. Beyond them, the body is read as fast as it is used.
"""

from __future__ import annotations

import asyncio
import re

from starlette.requests import ClientDisconnect

from serving.api.gateway import Gateway
from serving.api.reading import LARGEST_BODIES
from serving.api.request import Request
from serving.errors import BadRequest, BodyTooLarge

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
        self._next: bytes | BodyTooLarge | None = None  # of `first`
        self._arrived, self._used = asyncio.Event(), asyncio.Event()

    async def first(self) -> None:
        """Wait for the first line. Raises `BadRequest` without any, `ClientDisconnect`."""
        self._next = self._cut()
        while self._next is None:
            if self._complete:
                raise BadRequest("the body has no lines, must have one JSON value a line")
            await self._receive()
            self._next = self._cut()

    async def read(self) -> None:
        """Read the body as far ahead as the limits allow. Raises `ClientDisconnect` at the end."""
        while True:
            while self._is_full():
                self._used.clear()
                await self._used.wait()
            await self._receive()
            self._arrived.set()

    async def next(self) -> bytes | BodyTooLarge | None:
        """Return the next line, an error in place of one that is too long, None at the end."""
        if self._next is not None:
            first, self._next = self._next, None
            return first
        while (line := self._cut()) is None and not self._complete:
            self._arrived.clear()
            await self._arrived.wait()
        return line

    async def _receive(self) -> None:
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._complete = not message.get("more_body", False)
        chunk = message.get("body", b"")
        self._data += chunk
        self._count(len(chunk))

    def _is_full(self) -> bool:
        if len(self._data) > self._max_line:
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
