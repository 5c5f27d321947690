"""Answers requests of any contract with the engine: queue, begin, stream, end or fail.

A contract parses a request to an `EngineRequest`, and its `Renderer` writes the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from anyio import CancelScope
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from common.errors import DeadlineExceeded, EngineError, InvalidRequest, ServiceError
from common.media_types import JSON
from serving.api.answer_form import GivenForm, named_by_request
from serving.api.engine_calls import Begun, EngineCall, Item
from serving.api.gateway import Gateway
from serving.api.routing import EVENTS
from serving.errors import Unavailable
from serving.models.model import Model

# Log-probabilities in one answer, over all prompts, sequences and tokens; these take some 30 MB.
MAX_SCORES = 400_000
UNREAD_S = 5.0  # time after a stream's deadline in which its client must read the last piece
LATE = DeadlineExceeded("the answer was not ready in time")  # ends a stream at its deadline


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A request to the engine, parsed from any contract.

    prompts: each is sent to the engine as a request of its own
    parameters: the engine's parameters, for `n` or more sequences of each prompt
    kind: the engine's field for a prompt; see `engine.http.async_client`
    form: the constraint on the answer, if the request has one
    adapter: a model in the body, which answers instead of the route's model; "" for none
    """

    prompts: Sequence[Any]
    parameters: Mapping[str, Any]
    kind: str = "inputs"
    stream: bool = False
    n: int = 1
    form: GivenForm | None = None
    adapter: str = ""


def event(value: Any) -> bytes:
    """Encode a value as a server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class Choices(Protocol):
    """Writes the answers to one prompt of a stream."""

    def write(self, item: Item) -> bytes:
        """Return the events for one token from the engine."""


class Renderer:
    """Writes an answer in the format of its contract."""

    stream_type = EVENTS
    whole_type = JSON

    def compact(self, token: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a token with only those scores that the whole answer needs, to save memory."""
        return token

    def whole(self, results: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the body of a whole answer; `results` are the engine's answers to the prompts."""
        raise NotImplementedError

    def begin(self) -> bytes:
        return b""

    def choices(self, prompt: Any, first: int) -> Choices:
        """Return the writer of a prompt's answers, whose indexes begin at `first`."""
        return self

    def write(self, item: Item) -> bytes:
        raise NotImplementedError

    def end(self) -> bytes:
        return b""

    def broken(self, error: ServiceError) -> bytes:
        """Return the last piece of a stream that ends with an error."""
        raise NotImplementedError


async def answer(
    gateway: Gateway,
    model: Model,
    request: EngineRequest,
    renderer: Renderer,
    end: float,
    resources: AsyncExitStack,
) -> Response:
    """Return the model's answer, whole or as a stream, which closes `resources` at its end.

    A stream takes one place in the model's queue, a whole answer one for each prompt.
    """
    call = EngineCall(gateway, model, request.parameters, request.kind, end)
    try:
        if request.stream:
            await resources.enter_async_context(call.place())
            first = await call.begin(request.prompts[0], resources)
            pieces = _pieces(request, renderer, first, call, resources)
            return TokenStream(pieces, renderer, end, resources.pop_all())
        body = renderer.whole(await _whole(request, renderer, call))
    except EngineError as error:
        raise named_by_request(error, request.form) from None
    return Response(body, media_type=renderer.whole_type)


async def _whole(
    request: EngineRequest, renderer: Renderer, call: EngineCall
) -> list[dict[str, Any]]:
    """Return the engine's answers to all prompts.

    With log-probabilities answers are long: they are read and converted token by token.
    """
    scores = 0

    def compact(token: Item) -> Mapping[str, Any]:
        nonlocal scores
        scores += 1 + len(token.get("top", ()))
        if scores > MAX_SCORES:  # the model's context is longer than `parsing.CONTEXT`
            raise InvalidRequest(
                f"logprobs asks for more than {MAX_SCORES} log-probabilities", field="logprobs"
            )
        return renderer.compact(token)

    scored = not {"logprobs", "decoder_input_details"}.isdisjoint(request.parameters)

    async def one(prompt: Any) -> dict[str, Any]:
        async with call.place():
            return await (call.collect(prompt, compact) if scored else call.whole(prompt))

    if len(request.prompts) == 1:
        return [await one(request.prompts[0])]
    tasks = [asyncio.create_task(one(prompt)) for prompt in request.prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _pieces(
    request: EngineRequest,
    renderer: Renderer,
    first: Begun,
    call: EngineCall,
    resources: AsyncExitStack,
) -> AsyncIterator[bytes]:
    """Yield a stream's pieces, one prompt after the other; `first` is the first prompt's stream."""
    try:
        if sent := renderer.begin():
            yield sent
        for i, prompt in enumerate(request.prompts):
            choices = renderer.choices(prompt, i * request.n)
            items, item = first if i == 0 else await call.begin(prompt, resources)
            if sent := choices.write(item):
                yield sent
            async for item in items:
                if sent := choices.write(item):
                    yield sent
        if sent := renderer.end():
            yield sent
    except EngineError as error:
        yield renderer.broken(named_by_request(error, request.form))
    except Unavailable as error:  # a later prompt found the model lost
        yield renderer.broken(error)


class TokenStream(StreamingResponse):
    """A stream of tokens that holds `resources` until it ends or its client disconnects.

    At its deadline `end` it breaks off with the error `LATE`. A client that has not read that after
    another `UNREAD_S` is disconnected.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        renderer: Renderer,
        end: float,
        resources: AsyncExitStack,
    ) -> None:
        headers = {"cache-control": "no-store"}
        super().__init__(content, media_type=renderer.stream_type, headers=headers)
        self._renderer, self._end, self._resources = renderer, end, resources
        self.frame: Callable[[bytes], bytes] = bytes  # what the protocol puts around each piece

    async def close(self) -> None:
        """End the stream of a response that is not sent."""
        await self._resources.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ended = False

        async def send_until_end(message: Any) -> None:
            nonlocal ended
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")

        async with self._resources:
            with CancelScope(deadline=self._end) as work:
                await super().__call__(scope, receive, send_until_end)
            if work.cancelled_caught and not ended:  # the end may be sent at the deadline itself
                with CancelScope(deadline=self._end + UNREAD_S):
                    last = self.frame(self._renderer.broken(LATE))
                    await send({"type": "http.response.body", "body": last})
