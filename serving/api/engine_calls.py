"""Calls of the engine by the gateway, repeated where the engine is restarted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import EngineUnavailable, ModelNotFound
from common.worker_protocol import TIMEOUT_HEADER
from serving.api.gateway import Gateway
from serving.errors import ServingError, Unavailable
from serving.models.model import Model
from serving.tokens import current

RESTORE_S = 15.0
RETRY_S = 0.2

T = TypeVar("T")
Item = dict[str, Any]  # one token from the engine
Begun = tuple[AsyncIterator[Item], Item]
Compact = Callable[[Item], Mapping[str, Any]]


@dataclass(frozen=True)
class EngineCall:
    """Sends prompts to a model of the engine, until the deadline `end` on the monotonic clock.

    `kind` is the engine's field for a prompt (`engine.http.async_client`). Prompts' and answers'
    tokens are counted for the request's token of TOKENS_FILE.
    """

    gateway: Gateway
    model: Model
    parameters: Mapping[str, Any]
    kind: str
    end: float

    def place(self) -> AbstractAsyncContextManager[None]:
        """Hold one of the model's places, waiting for it in the model's queue."""
        return self.gateway.admission.place(self.model.line, self.end)

    async def begin(self, prompt: Any, resources: AsyncExitStack) -> Begun:
        """Start a stream; return its further tokens and its first. Closing `resources` ends it."""

        async def stream() -> Begun:
            items = self._stream(prompt, counted=True)
            await resources.enter_async_context(aclosing(items))
            return items, await anext(items)

        return await while_restored(self.gateway, self.model, self.end, stream)

    async def whole(self, prompt: Any) -> dict[str, Any]:
        """Return the engine's whole answer to a prompt."""

        async def generate() -> dict[str, Any]:
            result = await self.gateway.engine.generate(*self._arguments(prompt))
            _count(result["prompt_tokens"], result["completions"])
            return result

        return await while_restored(self.gateway, self.model, self.end, generate)

    async def collect(self, prompt: Any, compact: Compact) -> dict[str, Any]:
        """Collect a stream to a whole answer, with the `texts` of its tokens.

        `compact` reduces the scores of each token at once, to save memory.
        """

        async def collect() -> dict[str, Any]:
            result: dict[str, Any] = {}
            completions: dict[int, Item] = {}
            async with aclosing(self._stream(prompt, counted=False)) as items:
                async for item in items:
                    completion = completions.setdefault(item["index"], {"texts": []})
                    completion["texts"].append(item["text"])
                    completion["finish_reason"] = item.get("finish_reason")
                    if "logprobs" in item:
                        completion.setdefault("logprobs", []).append(compact(item["logprobs"]))
                    completion |= choice_logprobs(item)
                    for name in item.keys() & {"accepted_tokens", "rejected_tokens"}:
                        completion[name] = completion.get(name, 0) + item[name]
                    if "prefill" in item:
                        completion["prefill"] = [compact(token) for token in item["prefill"]]
                    counts = ("prompt_tokens", "cached_tokens")
                    result |= {k: v for k, v in item.items() if k in counts}
            for completion in completions.values():
                texts = completion["texts"]
                completion |= {"text": "".join(texts), "tokens": len(texts)}
            _count(result.get("prompt_tokens", 0), completions.values())
            return {**result, "completions": [completions[i] for i in sorted(completions)]}

        return await while_restored(self.gateway, self.model, self.end, collect)

    def _arguments(self, prompt: Any) -> tuple[str, Any, Mapping[str, Any], float, str]:
        return self.model.engine_name, prompt, self.parameters, left_s(self.end), self.kind

    async def _stream(self, prompt: Any, *, counted: bool) -> AsyncGenerator[Item, None]:
        # A call that may be repeated after its first token counts its whole answer at the end.
        token = current.get() if counted else None
        begun = False
        async with aclosing(self.gateway.engine.stream(*self._arguments(prompt))) as items:
            async for item in items:
                if token is not None:  # the first token of each sequence has the prompt's length
                    token.usage.count(0 if begun else item.get("prompt_tokens", 0), 1)
                    begun = True
                yield item


def _count(prompt_tokens: int, completions: Iterable[Mapping[str, Any]]) -> None:
    """Count a whole answer for the request's token of TOKENS_FILE."""
    if (token := current.get()) is not None:
        token.usage.count(prompt_tokens, sum(completion["tokens"] for completion in completions))


def choice_logprobs(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the field `choice_logprobs` of an answer, empty if it has none."""
    return {name: answer[name] for name in ("choice_logprobs",) if name in answer}


def left_s(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


async def while_restored(
    gateway: Gateway, model: Model, end: float, call: Callable[[], Awaitable[T]]
) -> T:
    """Return the result of `call`, repeated while the engine restarts.

    It is repeated for at most `RESTORE_S` after its first failure, however long it ran before.
    Raises `EngineUnavailable` or `Unavailable` if the engine or the model is not back by then.
    """
    restored: float | None = None
    while True:
        try:
            return await call()
        except (EngineUnavailable, ModelNotFound) as error:
            now = time.monotonic()
            if restored is None:
                restored = min(end, now + RESTORE_S)
            if now > restored:
                if isinstance(error, EngineUnavailable) or (
                    gateway.registry.find(model.name) is not model
                ):
                    raise
                again = f"Model {model.name} is being loaded again"
                raise Unavailable(again) from None
            await asyncio.sleep(RETRY_S)
            await _have_it_loaded(gateway, model)


async def _have_it_loaded(gateway: Gateway, model: Model) -> None:
    """Send the model's worker a request, at which it loads a lost model into the engine again."""
    body = {"inputs": "가", "parameters": {"max_new_tokens": 1}}
    headers = {"content-type": "application/json", TIMEOUT_HEADER: f"{RESTORE_S:g}"}
    with suppress(ServingError):
        await gateway.mms.invoke(model.id, json.dumps(body).encode(), headers, RESTORE_S)
