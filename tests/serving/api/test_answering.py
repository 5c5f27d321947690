"""Streams at their deadlines, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from serving.api.answering import Renderer, TokenStream
from tests.serving.api.gateways import SAID
from tests.serving.virtual_time import VirtualLoop

pytestmark = pytest.mark.virtual_time


async def test_nothing_follows_the_end_of_a_stream_that_ends_at_its_deadline() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield SAID.encode()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            loop.now += 1  # the deadline passes in the step that sends the end

    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    sent: list[Any] = []
    end = time.monotonic() + 1
    stream = TokenStream(pieces(), Renderer(), end, AsyncExitStack())
    await stream({"type": "http"}, receive, send)
    assert [message["body"] for message in sent[1:]] == [SAID.encode(), b""]
