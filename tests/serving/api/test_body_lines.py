"""The lines of a body are the same however it arrives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from serving.api.body_lines import BodyLines
from serving.api.request import Request, RequestState
from serving.errors import BadRequest, BodyTooLarge
from tests.serving.api.gateways import World, settle

MOST = 12
MARK = b"\xef\xbb\xbf"
PIECES = st.sampled_from([b"\n", b"\r\n", b" ", b"\t", b"{}", "가".encode(), MARK, b"x" * 9])


def lines_of(world: World, pieces: Sequence[bytes]) -> BodyLines:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    scope = {"type": "http", "headers": [], "state": RequestState("봄", None, 0.0)}
    return BodyLines(world.gateway, Request(scope, receive))


async def read(pieces: Sequence[bytes]) -> list[bytes | None]:
    """All lines, None in place of one that is too long."""
    world = World(max_request_bytes=MOST)
    lines = lines_of(world, pieces)
    try:
        await lines.first()
    except BadRequest:
        return []
    reading = asyncio.create_task(lines.read(lambda: False))
    found = []
    while (line := await lines.next()) is not None:
        found.append(None if isinstance(line, BodyTooLarge) else line)
    with pytest.raises(ClientDisconnect):
        await reading
    assert world.gateway.body_bytes == 0
    return found


def expected(body: bytes) -> list[bytes | None]:
    lines = [line.lstrip(b" \t\r") for line in body.removeprefix(MARK).split(b"\n")]
    content = [line.rstrip(b" \t\r") for line in lines]
    return [
        (short if len(line) <= MOST else None)
        for line, short in zip(lines, content, strict=True)
        if short
    ]


@given(st.lists(PIECES, max_size=30), st.lists(st.integers(0, 80), max_size=8))
def test_a_body_may_be_cut_anywhere(parts: list[bytes], cuts: list[int]) -> None:
    body = b"".join(parts)
    ends = [0, *sorted(cuts), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(ends)]
    assert asyncio.run(read(pieces)) == expected(body)


async def test_blank_lines_take_no_steps_each() -> None:
    """Ten million would block the event loop for seconds."""
    world = World()
    lines = lines_of(world, [b"\n" * 1000, b" \r\n" * 1000 + b"1\n"])
    steps = 0

    def drop(size: int) -> None:
        nonlocal steps
        steps += 1
        dropped(size)

    dropped, lines._drop = lines._drop, drop  # type: ignore[method-assign]
    await lines.first()
    assert await lines.next() == b"1"
    assert steps < 10


async def test_where_bodies_take_much_memory_a_line_is_used_before_more_is_read() -> None:
    world = World(max_request_bytes=MOST)
    pieces = [b"1\n2", b"\n3\n4\n", b"5", b"\n"]
    lines = lines_of(world, pieces)
    await lines.first()
    world.gateway.body_bytes += 1000 * MOST  # of others
    reading = asyncio.create_task(lines.read(lambda: False))
    read_ahead = []
    for number in (b"1", b"2", b"3", b"4", b"5"):
        await settle()
        read_ahead.append(bytes(lines._data))
        assert await lines.next() == number
    # A line that is incomplete is read on, or nothing would ever be used.
    assert read_ahead == [b"2\n3\n4\n", b"2\n3\n4\n", b"3\n4\n", b"4\n", b"5\n"]
    reading.cancel()
