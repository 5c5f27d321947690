"""Two hundred streams of two fine-tunes at once: each client gets its own text, whole, in order.

Of one gRPC call: tests/serving/api/grpc/test_port.py."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.e2e.server import Server
from tests.e2e.stores import small, text

pytestmark = pytest.mark.slow

NAMES = ("봄", "여름")
COUNT = 200
TOKENS = 24
# Greedy, and no token twice: pieces that change places change the text.
GREEDY = {"max_new_tokens": TOKENS, "repetition_penalty": 50}
PROMPTS = [f"{first} {second}" for first in "나산책집말일" for second in ("이", "에", "가")]


STREAMS = [(NAMES[i % 2], PROMPTS[i % len(PROMPTS)]) for i in range(COUNT)]  # model and prompt


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    for seed, name in enumerate(NAMES):
        small(clean.store / name, seed)
    return clean


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[tuple[str, str], str]:
    """The texts, asked for one after the other."""
    found = {}
    for name in NAMES:
        for prompt in PROMPTS:
            answer = server.predict(name, {"inputs": prompt, "parameters": GREEDY})
            found[name, prompt] = text(answer)
    assert len(set(found.values())) == len(found)
    return found


async def pieces_of(server: Server, model: str, prompt: str) -> list[str]:
    """The texts of a stream's tokens."""
    body = {"inputs": prompt, "parameters": GREEDY, "stream": True}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        session.post(
            server.url(f"/predictions/{model}"),
            json=body,
            headers={"Accept": "application/x-ndjson"},
        ) as answer,
    ):
        assert answer.status == 200, await answer.text()
        *tokens, end = [json.loads(line) async for line in answer.content]
    assert end["tokens"] == len(tokens) == TOKENS
    return [token["text"] for token in tokens]


async def test_no_token_is_lost_mixed_up_or_out_of_order(
    server: Server, expected: dict[tuple[str, str], str]
) -> None:
    found = await asyncio.gather(*(pieces_of(server, *stream) for stream in STREAMS))
    for stream, pieces in zip(STREAMS, found, strict=True):
        assert "".join(pieces) == expected[stream], stream
        assert len(set(pieces)) > TOKENS / 2
