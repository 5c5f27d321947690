"""The asynchronous client of the engine process, for the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import quote

from common.errors import EngineError, EngineUnavailable, OutOfMemory
from common.unix_http import UnixHTTP
from engine.http.client import GRACE_S, LOAD_TIMEOUT_S, error_of

CHECK_TIMEOUT_S = 10.0


HEADERS = {"content-type": "application/json"}


class AsyncEngineClient:
    """Every call raises the engine's errors, or `EngineUnavailable`."""

    def __init__(self, path: str) -> None:
        self._http = UnixHTTP(path)

    def close(self) -> None:
        self._http.close()

    async def check(
        self,
        name: str,
        model_dir: str,
        backend: str | None = None,
        precision: str | None = None,
        promised: Mapping[str, int] | None = None,
        base: str | None = None,
    ) -> int:
        """What the weights will take, in bytes, if they fit beside what is `promised`: bytes, by
        the names of models that will be loaded.

        Raises what `load` would for want of room, or for an artifact that is none.
        """
        body = {"name": name, "model_dir": model_dir, "backend": backend, "precision": precision}
        asked = {**body, "base": base, "promised": dict(promised or {})}
        room = await self._call("POST", "/room", asked, CHECK_TIMEOUT_S)
        needed = int(room["weight_bytes"])
        if "missing_bytes" in room:
            missing = room["missing_bytes"]
            raise OutOfMemory(room["message"], missing_bytes=missing, needed_bytes=needed)
        return needed

    async def unload(self, name: str) -> None:
        """Returns once the memory is free again."""
        await self._call("DELETE", _url(name), None, LOAD_TIMEOUT_S)

    async def models(self) -> list[dict[str, Any]]:
        """The names of those that are loaded, and what each holds of the budget."""
        found: list[dict[str, Any]] = (await self._call("GET", "/models", None, 10.0))["models"]
        return found

    async def statistics(self, timeout_s: float = 10.0) -> dict[str, Any]:
        found: dict[str, Any] = await self._call("GET", "/statistics", None, timeout_s)
        return found

    async def is_healthy(self) -> bool:
        try:
            await self._call("GET", "/health", None, 2.0)
        except EngineError:
            return False
        return True

    async def generate(
        self,
        name: str,
        inputs: Any,
        parameters: Mapping[str, Any],
        timeout_s: float = 60.0,
        kind: str = "inputs",
    ) -> dict[str, Any]:
        """The whole answer. `inputs` are what `engine.http.server` knows by this name: "inputs",
        "prompt" or "messages". A caller that is cancelled frees the request's place in the batch.
        """
        body = {kind: inputs, "parameters": parameters, "timeout_s": timeout_s}
        url = _url(name, "/generate")
        answer: dict[str, Any] = await self._call("POST", url, body, timeout_s + GRACE_S)
        return answer

    async def tokenize(
        self, name: str, inputs: Any, kind: str, special: bool, timeout_s: float
    ) -> dict[str, Any]:
        """`{"tokens", "texts", "max_length"}` of a "prompt" or "messages", as `kind` says; a
        prompt's with what the tokenizer puts in front where `special`."""
        body = {kind: inputs, "special": special}
        found: dict[str, Any] = await self._call("POST", _url(name, "/tokenize"), body, timeout_s)
        return found

    async def detokenize(self, name: str, tokens: list[int], timeout_s: float) -> str:
        found = await self._call("POST", _url(name, "/detokenize"), {"tokens": tokens}, timeout_s)
        return str(found["text"])

    async def cancel(self, request_id: str) -> None:
        """Frees the place of the request that a worker sent under this id, now or later."""
        await self._call("DELETE", f"/requests/{request_id}", None, 10.0)

    async def stream(
        self,
        name: str,
        inputs: Any,
        parameters: Mapping[str, Any],
        timeout_s: float = 60.0,
        kind: str = "inputs",
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Each token as it is made: `{"index", "token", "text", "logprobs"?, "finish_reason"?}`,
        a sequence's first one with `prompt_tokens`.

        Leaving the loop frees the request's place in the batch. `kind` as for `generate`.
        """
        body = {kind: inputs, "parameters": parameters, "timeout_s": timeout_s, "stream": True}
        content, limit_s = json.dumps(body).encode(), timeout_s + GRACE_S
        try:
            async with self._http.stream(
                "POST", _url(name, "/generate"), limit_s, HEADERS, content
            ) as answer:
                rest, finished = b"", False
                while piece := await answer.piece():
                    if answer.status >= 400:
                        rest += piece
                        continue
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        item = json.loads(line)
                        if "error" in item:
                            status = item["error"]["code"]
                            raise error_of(status, json.dumps(item["error"]).encode(), None)
                        finished = "finish_reason" in item
                        yield item
                if answer.status >= 400:
                    raise error_of(answer.status, rest, answer.headers.get("retry-after"))
                if not finished:
                    raise EngineUnavailable("the engine ended in the middle of the answer")
        except (OSError, asyncio.TimeoutError) as error:
            raise EngineUnavailable("the engine is not there") from error

    async def _call(
        self, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Any:
        content = None if body is None else json.dumps(body).encode()
        try:
            status, headers, found = await self._http.ask(method, url, timeout_s, HEADERS, content)
            if status >= 400:
                raise error_of(status, found, headers.get("retry-after"))
            return json.loads(found) if found else None
        except (OSError, asyncio.TimeoutError) as error:
            raise EngineUnavailable("the engine is not there") from error
        except ValueError as error:
            raise EngineUnavailable("the engine's answer is not JSON") from error


def _url(name: str, action: str = "") -> str:
    return f"/models/{quote(name, safe='')}{action}"
