"""Text that comes while it is made: server-sent events and JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import psutil
import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import (
    ENDLESS,
    ENDLESS_TOKENS,
    SHORT,
    count,
    endless,
    error,
    events,
    running,
    small,
    text,
)


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    small(clean.store / "봄")
    small(clean.store / "여름", 1)
    endless(clean.store / "slow")
    return clean


Ask = Callable[..., requests.Response]


@pytest.fixture
def ask(server: Server) -> Iterator[Ask]:
    """Sends a request for a stream, of which nothing has been read yet."""
    with contextlib.ExitStack() as opened:

        def send(name: str, body: Any, **headers: str) -> requests.Response:
            sent = {"json": {**body, "stream": True}, "headers": headers}
            answer = server.post(f"/predictions/{name}", stream=True, **sent)
            return opened.enter_context(answer)

        yield send


def values(answer: requests.Response) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events(answer)]


def test_each_token_is_an_event_and_the_last_has_the_whole_text(server: Server, ask: Ask) -> None:
    whole = server.predict("봄", SHORT).json()
    *tokens, end = values(ask("봄", SHORT))
    assert end["generated_text"] == whole["generated_text"]
    assert (end["tokens"], end["finish_reason"]) == (whole["tokens"], whole["finish_reason"])
    assert "".join(token["text"] for token in tokens) == whole["generated_text"]
    assert len(tokens) == whole["tokens"]


def test_several_sequences_are_told_apart(server: Server, ask: Ask) -> None:
    parameters = {"max_new_tokens": 6, "num_return_sequences": 2, "seed": 7}
    body = {"inputs": "나는 오늘", "parameters": parameters}
    whole = server.predict("봄", body).json()["sequences"]
    ends = [event for event in values(ask("봄", body)) if "generated_text" in event]
    made = {end["index"]: end["generated_text"] for end in ends}
    assert made == {i: sequence["generated_text"] for i, sequence in enumerate(whole)}


def test_a_client_that_goes_away_frees_its_place_and_the_model(server: Server, ask: Ask) -> None:
    body = {**ENDLESS, "parameters": {**ENDLESS["parameters"], "num_return_sequences": 8}}
    answer = ask("slow", body)
    lines = answer.iter_lines()  # hangs up when nobody holds it
    next(lines)  # long before the last
    assert running(server) == 8
    before = count(server, "steps", "slow")
    answer.close()
    eventually(lambda: running(server) == 0)
    assert count(server, "steps", "slow") - before < ENDLESS_TOKENS / 2
    assert server.unload("slow").status_code == 200


def test_a_wrong_request_has_its_status_and_no_stream(server: Server, ask: Ask) -> None:
    assert error(ask("봄", {"inputs": ""}))[0] == 400
    assert error(ask("봄", {"inputs": "가" * 3000}))[0] == 413
    wrong = server.post("/predictions/봄", json={**SHORT, "stream": "yes"})
    assert error(wrong) == (400, "InvalidRequest")
    assert error(ask("봄", SHORT, Accept="image/png")) == (406, "NotAcceptable")


def test_a_stream_that_breaks_off_says_so_and_the_next_one_works(server: Server, ask: Ask) -> None:
    answer = ask("slow", ENDLESS)
    lines = answer.iter_lines()
    next(lines)
    (engine,) = server.descendants("-m engine ")
    psutil.Process(engine.pid).kill()
    *_, last = [line for line in lines if line]
    said = json.loads(last.removeprefix(b"data: "))["error"]
    assert (said["code"], said["type"]) == (503, "EngineUnavailable")

    *_, end = values(ask("봄", SHORT))
    assert end["generated_text"] == text(server.predict("봄", SHORT))


# Two hundred streams of two models at once. Of one gRPC call: serving/api/grpc/test_port.py

TOKENS = 24
# Greedy, and no token twice: pieces that change places change the text.
GREEDY = {"max_new_tokens": TOKENS, "repetition_penalty": 50}
PROMPTS = [f"{first} {second}" for first in "나산책집말일" for second in ("이", "에", "가")]
STREAMS = [(("봄", "여름")[i % 2], PROMPTS[i % len(PROMPTS)]) for i in range(200)]


async def pieces_of(session: aiohttp.ClientSession, url: str, prompt: str) -> list[str]:
    """The texts of a stream's tokens."""
    body = {"inputs": prompt, "parameters": GREEDY, "stream": True}
    async with session.post(url, json=body, headers={"Accept": "application/x-ndjson"}) as answer:
        assert answer.status == 200, await answer.text()
        *tokens, end = [json.loads(line) async for line in answer.content]
    assert end["tokens"] == len(tokens) == TOKENS
    return [token["text"] for token in tokens]


@pytest.mark.slow
def test_no_token_is_lost_mixed_up_or_out_of_order(server: Server) -> None:
    expected = {
        (name, prompt): text(server.predict(name, {"inputs": prompt, "parameters": GREEDY}))
        for name, prompt in {*STREAMS}
    }
    assert len(set(expected.values())) == len(expected)

    async def all_() -> list[list[str]]:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            urls = [server.url(f"/predictions/{name}") for name, _ in STREAMS]
            asked = [pieces_of(session, url, p) for url, (_, p) in zip(urls, STREAMS, strict=True)]
            return await asyncio.gather(*asked)

    for stream, pieces in zip(STREAMS, asyncio.run(all_()), strict=True):
        assert "".join(pieces) == expected[stream], stream
        assert len(set(pieces)) > TOKENS / 2
