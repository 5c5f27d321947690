"""Streams a text while it is made: `{"inputs": ..., "stream": true}`.

Multi Model Server cannot stream, so the tokens come from the engine directly, as server-sent events
or, for `Accept: application/x-ndjson`, as JSON lines:

    {"text", "token", "index", "logprobs"?}                       each token
    {"generated_text", "tokens", "finish_reason", "index"}        the end of each sequence
    {"error": {"code", "type", "message"}}                        if it breaks off
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

from anyio import CancelScope
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from common.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    ModelNotFound,
    NotAcceptable,
)
from common.media_types import JSON, ranges
from common.worker_protocol import TIMEOUT_HEADER
from handlers.payload import GenerateRequest, parse
from serving.api.gateway import Gateway
from serving.errors import ServingError, Unavailable
from serving.models.model import Model
from serving.tokens import current

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
RESTORE_S = 15.0
RETRY_S = 0.2
# How much later than its end a stream has to be read.
UNREAD_S = 5.0
LATE = DeadlineExceeded("the answer was not ready in time")  # of a stream at its deadline

T = TypeVar("T")
Item = dict[str, Any]


def wanted(body: bytes, headers: Mapping[str, str]) -> GenerateRequest | None:
    """The request, if it asks for a stream."""
    if b'"stream"' not in body:
        return None
    with suppress(EngineError):  # the worker says what is wrong
        request = parse(body, headers.get("content-type"))
        return request if request.stream else None
    return None


class TokenStream(StreamingResponse):
    """A response that holds `resources` until its last token is sent or its client is gone.

    At `end` it closes with `late` as the last piece; a client that does not read that is cut off.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        kind: str,
        end: float,
        late: Callable[[], bytes],
        resources: AsyncExitStack,
    ) -> None:
        super().__init__(content, media_type=kind, headers={"cache-control": "no-store"})
        self._end, self._resources = end, resources
        self._late = late
        self.frame: Callable[[bytes], bytes] = bytes  # what the protocol puts around each piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            with CancelScope(deadline=self._end) as work:
                await super().__call__(scope, receive, send)
            if work.cancelled_caught:
                with CancelScope(deadline=self._end + UNREAD_S):
                    last = {"type": "http.response.body", "body": self.frame(self._late())}
                    await send(last)


async def open_stream(
    gateway: Gateway,
    model: Model,
    request: GenerateRequest,
    accept: str,
    end: float,
    resources: AsyncExitStack,
) -> TokenStream:
    """Waits for the first token, so that what goes wrong before it has a status of its own."""
    kind = _kind(accept)
    inputs, parameters = request.inputs, request.parameters
    items, first = await begin(gateway, model, inputs, parameters, end, resources)
    encode = _event if kind == EVENTS else _line
    late = encode({"error": LATE.to_body()})
    pieces = _encoded(request, first, items, encode)
    return TokenStream(pieces, kind, end, lambda: late, resources.pop_all())


async def begin(
    gateway: Gateway,
    model: Model,
    inputs: Any,
    parameters: Mapping[str, Any],
    end: float,
    resources: AsyncExitStack,
    kind: str = "inputs",
) -> tuple[AsyncIterator[Item], Item]:
    """The first token, and those behind it; `kind` as in `engine.http.async_client`."""

    async def stream() -> tuple[AsyncIterator[Item], Item]:
        left_s = max(end - time.monotonic(), 0.001)
        items = _counted(gateway.engine.stream(model.engine_name, inputs, parameters, left_s, kind))
        await resources.enter_async_context(aclosing(items))
        return items, await anext(items)

    return await while_restored(gateway, model, end, stream)


async def whole(
    gateway: Gateway,
    model: Model,
    inputs: Any,
    parameters: Mapping[str, Any],
    end: float,
    kind: str = "inputs",
) -> dict[str, Any]:
    """The whole answer, as `begin` has its first token."""

    async def generate() -> dict[str, Any]:
        left_s = max(end - time.monotonic(), 0.001)
        given = model.engine_name, inputs, parameters, left_s, kind
        result = await gateway.engine.generate(*given)
        if (token := current.get()) is not None:
            made = sum(completion["tokens"] for completion in result["completions"])
            token.usage.count(result["prompt_tokens"], made)
        return result

    return await while_restored(gateway, model, end, generate)


async def collected(
    gateway: Gateway,
    model: Model,
    inputs: Any,
    parameters: Mapping[str, Any],
    end: float,
    kind: str,
    compact: Callable[[Item], Mapping[str, Any]],
) -> dict[str, Any]:
    """As `whole`, made of a stream: of a token with its scores only what is `kept` stays."""

    async def collect() -> dict[str, Any]:
        left_s = max(end - time.monotonic(), 0.001)
        result: dict[str, Any] = {}
        completions: dict[int, Item] = {}
        items = _counted(gateway.engine.stream(model.engine_name, inputs, parameters, left_s, kind))
        async with aclosing(items):
            async for item in items:
                begun: Item = {"text": "", "tokens": 0, "finish_reason": None}
                completion = completions.setdefault(item["index"], begun)
                completion["text"] += item["text"]
                completion["tokens"] += 1
                completion["finish_reason"] = item.get("finish_reason")
                if "logprobs" in item:
                    completion.setdefault("logprobs", []).append(compact(item["logprobs"]))
                completion |= choice_logprobs(item)
                if "prefill" in item:
                    completion["prefill"] = [compact(token) for token in item["prefill"]]
                result |= {k: v for k, v in item.items() if k in ("prompt_tokens", "cached_tokens")}
        return {**result, "completions": [completions[i] for i in sorted(completions)]}

    return await while_restored(gateway, model, end, collect)


def choice_logprobs(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The log-probabilities of a choice's texts as a field, or no field where there are none."""
    return {name: answer[name] for name in ("choice_logprobs",) if name in answer}


def _counted(items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """The same, counted for the token of TOKENS_FILE that the request has."""
    token = current.get()

    async def counted() -> AsyncGenerator[Item, None]:
        async with aclosing(items):
            async for item in items:
                if token is not None:
                    token.usage.count(item.get("prompt_tokens", 0), 1)
                yield item

    return counted()


async def while_restored(
    gateway: Gateway, model: Model, end: float, ask: Callable[[], Awaitable[T]]
) -> T:
    """Returns what `ask` returns, and repeats it where the engine is restarted.

    Raises `Unavailable` where the engine has not loaded the model again in time.
    """
    restored = min(end, time.monotonic() + RESTORE_S)
    while True:
        try:
            return await ask()
        except (EngineUnavailable, ModelNotFound) as error:
            if time.monotonic() > restored:
                if isinstance(error, EngineUnavailable) or (
                    gateway.registry.find(model.name) is not model
                ):
                    raise
                again = f"Model {model.name} is being loaded again"
                raise Unavailable(again) from None
            await asyncio.sleep(RETRY_S)
            await _have_it_loaded(gateway, model)


async def _have_it_loaded(gateway: Gateway, model: Model) -> None:
    """A call through its worker has the worker load the model again, if the engine has lost it."""
    body = {"inputs": "가", "parameters": {"max_new_tokens": 1}}
    headers = {"content-type": "application/json", TIMEOUT_HEADER: f"{RESTORE_S:g}"}
    with suppress(ServingError):
        await gateway.mms.invoke(model.id, json.dumps(body).encode(), headers, RESTORE_S)


def _kind(accept: str) -> str:
    """Raises `NotAcceptable`."""
    accepted = {kind for kind, weight in ranges(accept).items() if weight}
    if LINES in accepted:
        return LINES
    # `Accept: application/json` of a client that always sends it; the body says that it streams.
    if accepted & {"*/*", "text/*", JSON, EVENTS}:
        return EVENTS
    raise NotAcceptable(f"Accept is {accept}, can be {EVENTS} or {LINES} for a stream")


async def _encoded(
    request: GenerateRequest,
    first: Item,
    items: AsyncIterator[Item],
    encode: Callable[[Item], bytes],
) -> AsyncIterator[bytes]:
    full = ""
    if isinstance(request.inputs, str) and request.parameters.get("return_full_text"):
        full = request.inputs
    texts: dict[int, list[str]] = {}

    def events(item: Item) -> bytes:
        index = item["index"]
        made = texts.setdefault(index, [full] if full else [])
        made.append(item["text"])
        reason = item.pop("finish_reason", None)
        for name in ("prompt_tokens", "cached_tokens"):
            item.pop(name, None)
        sent = encode(item)
        if reason is not None:
            tokens = len(made) - bool(full)
            end = {"generated_text": "".join(made), "tokens": tokens, "finish_reason": reason}
            sent += encode({**end, "index": index})
        return sent

    yield events(first)
    try:
        async for item in items:
            yield events(item)
    except EngineError as error:
        yield encode({"error": error.to_body()})


def _event(item: Item) -> bytes:
    return b"data: " + _json(item) + b"\n\n"


def _line(item: Item) -> bytes:
    return _json(item) + b"\n"


def _json(item: Item) -> bytes:
    return json.dumps(item, ensure_ascii=False).encode("utf-8", "replace")
