"""Calls of an engine that is restarted under them, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.errors import EngineUnavailable
from serving.api.engine_calls import RESTORE_S
from tests.serving.api.gateways import SAID, FakeEngine, World

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
