"""Has a model answer, by the engine itself: whole answers and streams alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from starlette.responses import Response

from common.errors import DeadlineExceeded, EngineError
from serving.api.answer_form import named_by_request
from serving.api.openai.asked import MAX_SCORES, Asked
from serving.api.openai.errors import Refused
from serving.api.shared import Gateway
from serving.api.stream import EVENTS, Item, TokenStream, begin, collected, whole
from serving.models.model import Model


class Choices(Protocol):
    """The answers to one prompt in a stream."""

    def write(self, item: Item) -> bytes:
        """The events of a token of the engine's."""


class Form(Protocol):
    """An answer as its API writes it."""

    def kept(self, token: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is kept of a token of the engine's until the whole answer is made."""

    def whole(self, results: Sequence[Mapping[str, Any]]) -> bytes:
        """`results` are the engine's answers to the prompts."""

    def begin(self) -> bytes: ...

    def choices(self, prompt: Any, first: int) -> Choices:
        """`first` is the index of the prompt's first answer."""

    def end(self) -> bytes: ...

    def broken(self, error: EngineError) -> bytes:
        """The end of a stream that breaks off."""


async def answer(
    gateway: Gateway,
    model: Model,
    asked: Asked,
    form: Form,
    end: float,
    resources: AsyncExitStack,
) -> Response:
    """Each prompt has a place of its own in the model's line. `resources` are a stream's."""
    try:
        if asked.stream:
            return await _stream(gateway, model, asked, form, end, resources)
        body = form.whole(await _whole(gateway, model, asked, form, end))
    except EngineError as error:
        raise named_by_request(error, asked.form) from None
    return Response(body, media_type="application/json")


async def _whole(
    gateway: Gateway, model: Model, asked: Asked, form: Form, end: float
) -> list[dict[str, Any]]:
    """The engine's answers to all prompts. With scores they are long: those are read and written
    token by token."""
    scores = 0

    def kept(token: Item) -> Mapping[str, Any]:
        nonlocal scores
        scores += 1 + len(token.get("top", ()))
        if scores > MAX_SCORES:  # of a model whose context is longer than `asked` takes it for
            raise Refused("logprobs", f"asks for more than {MAX_SCORES} log-probabilities")
        return form.kept(token)

    scored = not {"logprobs", "decoder_input_details"}.isdisjoint(asked.parameters)

    async def one(prompt: Any) -> dict[str, Any]:
        given = gateway, model, prompt, asked.parameters, end
        async with gateway.admission.place(model.line, end):
            if scored:
                return await collected(*given, asked.kind.value, kept)
            return await whole(*given, asked.kind.value)

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
    form: Form,
    end: float,
    resources: AsyncExitStack,
) -> TokenStream:
    """Prompts are continued one after the other; the first token of the first one is waited for."""
    await resources.enter_async_context(gateway.admission.place(model.line, end))

    async def begun(prompt: Any) -> tuple[AsyncIterator[Item], Item]:
        kind = asked.kind.value
        return await begin(gateway, model, prompt, asked.parameters, end, resources, kind)

    first = await begun(asked.prompts[0])

    async def chunks() -> AsyncIterator[bytes]:
        try:
            if sent := form.begin():
                yield sent
            for i, prompt in enumerate(asked.prompts):
                choices = form.choices(prompt, i * asked.n)
                items, item = first if i == 0 else await begun(prompt)
                if sent := choices.write(item):
                    yield sent
                async for item in items:
                    if sent := choices.write(item):
                        yield sent
            yield form.end()
        except EngineError as error:
            yield form.broken(named_by_request(error, asked.form))

    late = DeadlineExceeded("the answer was not ready in time")
    return TokenStream(chunks(), EVENTS, end, lambda: form.broken(late), resources.pop_all())
