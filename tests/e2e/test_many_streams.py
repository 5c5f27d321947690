"""Two hundred streams of two fine-tunes at once: each client gets its own text, whole, in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest

from tests.e2e.server import Server
from tests.e2e.stores import small, text
from tests.serving.api.grpc.clients import Client, asked, final, values

pytestmark = pytest.mark.slow

NAMES = ("봄", "여름")
COUNT = 200
TOKENS = 24
# Greedy, and no token twice: pieces that change places change the text.
GREEDY = {"max_new_tokens": TOKENS, "repetition_penalty": 50}
PROMPTS = [f"{first} {second}" for first in "나산책집말일" for second in ("이", "에", "가")]


@dataclass(frozen=True)
class Stream:
    number: int
    model: str
    prompt: str


STREAMS = [Stream(i, NAMES[i % 2], PROMPTS[i % len(PROMPTS)]) for i in range(COUNT)]
Read = Callable[[Server, Stream], Awaitable[list[str]]]


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


async def lines(server: Server, path: str, body: Any, **headers: str) -> list[Any]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(server.url(path), json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        told = [line.strip().removeprefix(b"data: ") async for line in answer.content]
        return [json.loads(line) for line in told if line not in (b"", b"[DONE]")]


async def by_our_route(server: Server, stream: Stream) -> list[str]:
    body = {"inputs": stream.prompt, "parameters": GREEDY, "stream": True}
    path = f"/predictions/{stream.model}"
    *tokens, end = await lines(server, path, body, Accept="application/x-ndjson")
    assert end["tokens"] == len(tokens) == TOKENS
    return [token["text"] for token in tokens]


async def by_openais(server: Server, stream: Stream) -> list[str]:
    body = {"model": stream.model, "prompt": stream.prompt, "stream": True, "temperature": 0}
    body |= {"max_tokens": TOKENS, "repetition_penalty": GREEDY["repetition_penalty"]}
    chunks = await lines(server, "/v1/completions", body)
    assert len({chunk["id"] for chunk in chunks}) == 1
    return [chunk["choices"][0]["text"] for chunk in chunks]


@pytest.mark.parametrize("read", [by_our_route, by_openais])
def test_no_token_is_lost_mixed_up_or_out_of_order(
    server: Server, expected: dict[tuple[str, str], str], read: Read
) -> None:
    async def all_() -> list[list[str]]:
        return await asyncio.gather(*(read(server, stream) for stream in STREAMS))

    for stream, pieces in zip(STREAMS, asyncio.run(all_()), strict=True):
        assert "".join(pieces) == expected[stream.model, stream.prompt], stream
        assert len(set(pieces)) > TOKENS / 2


def test_two_hundred_texts_of_one_call_are_told_apart(
    server: Server, expected: dict[tuple[str, str], str]
) -> None:
    requests = [asked(s.prompt, str(s.number), s.model, **GREEDY) for s in STREAMS]

    async def all_() -> dict[str, str]:
        texts = dict.fromkeys(map(str, range(COUNT)), "")
        ends = []
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            async for response in Client(channel)("ModelStreamInfer", iter(requests)):
                texts[response.infer_response.id] += values(response)["generated_text"]
                ends += [response.infer_response.id] * final(response)
        assert sorted(ends) == sorted(texts)
        return texts

    texts = asyncio.run(all_())
    for stream in STREAMS:
        assert texts[str(stream.number)] == expected[stream.model, stream.prompt], stream
