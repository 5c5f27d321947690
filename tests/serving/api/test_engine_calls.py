"""Calls of an engine that is restarted under them, in virtual time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import EngineUnavailable
from serving.api.engine_calls import RESTORE_S
from tests.serving.api.gateways import BEARER, SAID, FakeEngine, World, with_token

pytestmark = pytest.mark.virtual_time

PATH = "/v1/completions"
ASKED: dict[str, Any] = {"model": "봄", "prompt": "나 보기가"}


class EndingEngine(FakeEngine):
    """Ends under its first call, which has run for longer than a restart may take."""

    async def generate(self, *asked: Any) -> dict[str, Any]:
        if not self.asked:
            self.asked.append(asked)
            await asyncio.sleep(RESTORE_S + 1)
            raise EngineUnavailable("the engine has ended")
        return await super().generate(*asked)


async def test_a_long_call_is_repeated_when_the_engine_has_ended_under_it() -> None:
    world = World(engine=EndingEngine())
    status, _, body = await world.call("POST", PATH, ASKED)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, SAID)
    assert len(world.engine.asked) == 2


async def test_a_scored_answer_whose_call_is_repeated_counts_once(tmp_path: Path) -> None:
    def streamed(*_: Any) -> list[Any]:
        first = {"prompt_tokens": 3, "cached_tokens": 0, **item("가실 ")}
        if len(world.engine.asked) == 1:
            return [first, EngineUnavailable("the engine has ended")]
        return [first, {**item("때에는"), "finish_reason": "stop"}]

    world = await with_token(World(engine=FakeEngine(streamed=streamed)), tmp_path)
    asked = {**ASKED, "logprobs": 0}
    status, _, body = await world.call("POST", PATH, asked, authorization=BEARER)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "가실 때에는")
    (usage,) = (token.usage for token in world.gateway.tokens.all())
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {**ASKED, "n": 2}),
        (PATH, {**ASKED, "prompt": ["나 보기가"], "n": 2}),
        (
            "/predictions/봄",
            {"inputs": "나 보기가", "parameters": {"num_return_sequences": 2, "do_sample": True}},
        ),
    ],
)
async def test_a_stream_of_several_sequences_counts_its_prompt_once(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """The engine sends the prompt's length with the first token of each sequence."""
    first = {"token": 7, "text": "가실 ", "prompt_tokens": 3, "cached_tokens": 0}
    last = {"token": 8, "text": "때에는", "finish_reason": "stop"}
    streamed = [{"index": index, **item} for item in (first, last) for index in (0, 1)]
    world = await with_token(World(engine=FakeEngine(streamed=streamed)), tmp_path)
    asked = {**body, "stream": True}
    status, _, answer = await world.call("POST", path, asked, authorization=BEARER)
    assert (status, answer.decode().count("가실 ") >= 2) == (200, True)
    (usage,) = (token.usage for token in world.gateway.tokens.all())
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 4)


def item(text: str) -> dict[str, Any]:
    score = {"token": 7, "text": text, "logprob": -0.1, "top": []}
    return {"index": 0, "token": 7, "text": text, "logprobs": score}
