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
    status, _, body = await world.call("POST", PATH, json.dumps(ASKED).encode())
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, SAID)
    assert len(world.engine.asked) == 2


async def test_a_scored_answer_whose_call_is_repeated_counts_once(tmp_path: Path) -> None:
    def streamed(*_: Any) -> list[Any]:
        first = {"prompt_tokens": 3, "cached_tokens": 0, **item("가실 ")}
        if len(world.engine.asked) == 1:
            return [first, EngineUnavailable("the engine has ended")]
        return [first, {**item("때에는"), "finish_reason": "stop"}]

    world = await with_token(World(engine=FakeEngine(streamed=streamed)), tmp_path)
    asked = json.dumps({**ASKED, "logprobs": 0}).encode()
    status, _, body = await world.call("POST", PATH, asked, authorization=BEARER)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "가실 때에는")
    (usage,) = (token.usage for token in world.gateway.tokens.all())
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2)


def item(text: str) -> dict[str, Any]:
    score = {"token": 7, "text": text, "logprob": -0.1, "top": []}
    return {"index": 0, "token": 7, "text": text, "logprobs": score}
