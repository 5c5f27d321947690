"""Has a model answer, by the engine itself: whole answers and streams alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from common.errors import DeadlineExceeded, EngineError
from serving.api.invoke import engine_model
from serving.api.openai.answers import Answer, Choices
from serving.api.openai.asked import Asked
from serving.api.openai.errors import error_body
from serving.api.shared import Gateway
from serving.api.stream import EVENTS, TokenStream, begin, whole
from serving.models.model import Model
from serving.names import normal_name


async def answer(gateway: Gateway, request: Request, asked: Asked) -> Response:
    """Loads the model first where that is allowed, as `serving.api.invoke` does."""
    gateway.check_ready()
    name = normal_name(asked.model).lstrip("/")
    request.state.model = name
    made = Answer(asked, name)
    async with (
        AsyncExitStack() as resources,
        engine_model(gateway, request, name, resources) as (model, end),
    ):
        if asked.stream:
            return await _stream(gateway, model, asked, made, end, resources)
        body = made.whole(await _whole(gateway, model, asked, end))
        return Response(body, media_type="application/json")
    raise AssertionError("it was returned or raised")


async def _whole(gateway: Gateway, model: Model, asked: Asked, end: float) -> list[dict[str, Any]]:
    """The engine's answers to all prompts, each of which has a place of its own in the line."""

    async def one(prompt: Any) -> dict[str, Any]:
        async with gateway.admission.place(model.line, end):
            return await whole(gateway, model, prompt, asked.parameters, end, asked.kind.value)

    if len(asked.prompts) == 1:
        return [await one(asked.prompts[0])]
    tasks = [asyncio.create_task(one(prompt)) for prompt in asked.prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _stream(
    gateway: Gateway,
    model: Model,
    asked: Asked,
    made: Answer,
    end: float,
    resources: AsyncExitStack,
) -> TokenStream:
    """Prompts are continued one after the other; the first token of the first one is waited for."""
    await resources.enter_async_context(gateway.admission.place(model.line, end))

    async def begun(prompt: Any) -> tuple[AsyncIterator[Any], Any]:
        kind = asked.kind.value
        return await begin(gateway, model, prompt, asked.parameters, end, resources, kind)

    first = await begun(asked.prompts[0])

    async def chunks() -> AsyncIterator[bytes]:
        try:
            for i, prompt in enumerate(asked.prompts):
                choices = Choices(made, asked, prompt, i * asked.n)
                items, item = first if i == 0 else await begun(prompt)
                if sent := choices.write(item):
                    yield sent
                async for item in items:
                    if sent := choices.write(item):
                        yield sent
            yield made.end()
        except EngineError as error:
            yield _event(error)

    late = _event(DeadlineExceeded("the answer was not ready in time"))
    return TokenStream(chunks(), EVENTS, end, late, resources.pop_all())


def _event(error: EngineError) -> bytes:
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
