"""Streaming responses that end when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class NdjsonStream(StreamingResponse):
    """A stream that ends when its client disconnects, and calls `closed` however it ends."""

    def __init__(self, lines: AsyncIterator[str], closed: Callable[[], None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait([body, gone], return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                await body
        finally:
            body.cancel()
            gone.cancel()
            self._closed()


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
