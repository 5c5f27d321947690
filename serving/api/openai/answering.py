"""Has a model answer, by the engine itself: whole answers and streams alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from starlette.responses import Response

from common.errors import EngineError
from serving.api.answer_form import named_by_request
from serving.api.gateway import Gateway
from serving.api.openai.errors import Refused
from serving.api.openai.parsing import MAX_SCORES, ParsedRequest
from serving.api.stream import EVENTS, LATE, Item, TokenStream, begin, collected, whole
from serving.models.model import Model


class Choices(Protocol):
    """The answers to one prompt in a stream."""

    def write(self, item: Item) -> bytes:
        """The events of a token of the engine's."""


class Form(Protocol):
    """An answer as its API writes it."""

    def compact(self, token: Mapping[str, Any]) -> Mapping[str, Any]:
        """A token of the engine's, as small as the whole answer needs it."""

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
    parsed: ParsedRequest,
    form: Form,
    end: float,
    resources: AsyncExitStack,
) -> Response:
    """Each prompt has a place of its own in the model's line. `resources` are a stream's."""
    try:
        if parsed.stream:
            return await _stream(gateway, model, parsed, form, end, resources)
        body = form.whole(await _whole(gateway, model, parsed, form, end))
    except EngineError as error:
        raise named_by_request(error, parsed.form) from None
    return Response(body, media_type="application/json")


async def _whole(
    gateway: Gateway, model: Model, parsed: ParsedRequest, form: Form, end: float
) -> list[dict[str, Any]]:
    """Returns the engine's answers to all prompts.

    With log-probabilities answers are long: they are read and converted token by token.
    """
    scores = 0

    def compact(token: Item) -> Mapping[str, Any]:
        nonlocal scores
        scores += 1 + len(token.get("top", ()))
        if scores > MAX_SCORES:  # the model's context is longer than `parsing.CONTEXT`
            raise Refused("logprobs", f"asks for more than {MAX_SCORES} log-probabilities")
        return form.compact(token)

    scored = not {"logprobs", "decoder_input_details"}.isdisjoint(parsed.parameters)

    async def one(prompt: Any) -> dict[str, Any]:
        given = gateway, model, prompt, parsed.parameters, end
        async with gateway.admission.place(model.line, end):
            if scored:
                return await collected(*given, parsed.kind.value, compact)
            return await whole(*given, parsed.kind.value)

    if len(parsed.prompts) == 1:
        return [await one(parsed.prompts[0])]
    tasks = [asyncio.create_task(one(prompt)) for prompt in parsed.prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _stream(
    gateway: Gateway,
    model: Model,
    parsed: ParsedRequest,
    form: Form,
    end: float,
    resources: AsyncExitStack,
) -> TokenStream:
    """Prompts are continued one after the other; the first token of the first one is waited for."""
    await resources.enter_async_context(gateway.admission.place(model.line, end))

    async def begun(prompt: Any) -> tuple[AsyncIterator[Item], Item]:
        kind = parsed.kind.value
        return await begin(gateway, model, prompt, parsed.parameters, end, resources, kind)

    first = await begun(parsed.prompts[0])

    async def chunks() -> AsyncIterator[bytes]:
        try:
            if sent := form.begin():
                yield sent
            for i, prompt in enumerate(parsed.prompts):
                choices = form.choices(prompt, i * parsed.n)
                items, item = first if i == 0 else await begun(prompt)
                if sent := choices.write(item):
                    yield sent
                async for item in items:
                    if sent := choices.write(item):
                        yield sent
            yield form.end()
        except EngineError as error:
            yield form.broken(named_by_request(error, parsed.form))

    return TokenStream(chunks(), EVENTS, end, lambda: form.broken(LATE), resources.pop_all())
