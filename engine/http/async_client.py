"""The gateway's asynchronous client of the engine."""

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
    """A client for one event loop. All calls raise the engine's errors, or `EngineUnavailable`."""

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
        """Return the bytes of a model's weights if it can be loaded now, see `Engine.check`."""
        body: dict[str, Any] = {"name": name, "model_dir": model_dir, "base": base}
        body |= {"backend": backend, "precision": precision, "promised": dict(promised or {})}
        answer = await self._call("POST", "/room", body, CHECK_TIMEOUT_S)
        needed = int(answer["weight_bytes"])
        if "missing_bytes" in answer:
            missing = answer["missing_bytes"]
            raise OutOfMemory(answer["message"], missing_bytes=missing, needed_bytes=needed)
        return needed

    async def unload(self, name: str) -> None:
        """Unload a model; returns once its memory is free."""
        await self._call("DELETE", _url(name), None, LOAD_TIMEOUT_S)

    async def models(self) -> list[dict[str, Any]]:
        """Return the names of the loaded models and the bytes of the budget that each takes."""
        return list((await self._call("GET", "/models", None, 10.0))["models"])

    async def statistics(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return await self._call("GET", "/statistics", None, timeout_s)

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
        """Return the whole answer to a request.

        `kind` names the field that `inputs` are: "inputs", "prompt" or "messages"
        (`engine.http.server`). Cancelling the call frees the row of the request.
        """
        body = {kind: inputs, "parameters": parameters, "timeout_s": timeout_s}
        return await self._call("POST", _url(name, "/generate"), body, timeout_s + GRACE_S)

    async def tokenize(
        self, name: str, inputs: Any, kind: str, special: bool, timeout_s: float
    ) -> dict[str, Any]:
        """Return `{"tokens", "texts", "max_length"}` of a prompt; `kind` is "prompt" or "messages".

        With `special`, the tokens of a prompt include those that the tokenizer puts in front.
        """
        body = {kind: inputs, "special": special}
        return await self._call("POST", _url(name, "/tokenize"), body, timeout_s)

    async def detokenize(self, name: str, tokens: list[int], timeout_s: float) -> str:
        url = _url(name, "/detokenize")
        return str((await self._call("POST", url, {"tokens": tokens}, timeout_s))["text"])

    async def cancel(self, request_id: str) -> None:
        """Cancel the request with this id, also one that the engine has not received yet."""
        await self._call("DELETE", f"/requests/{request_id}", None, 10.0)

    async def stream(
        self,
        name: str,
        inputs: Any,
        parameters: Mapping[str, Any],
        timeout_s: float = 60.0,
        kind: str = "inputs",
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each token of an answer as soon as the engine sends it.

        A token is `{"index", "token", "text", "logprobs"?, "accepted_tokens"?, "rejected_tokens"?,
        "finish_reason"?}`, the first of a sequence also has `prompt_tokens`. Closing the generator
        frees the row of the request. `kind` as for `generate`.
        """
        body = {kind: inputs, "parameters": parameters, "timeout_s": timeout_s, "stream": True}
        content, limit_s = json.dumps(body).encode(), timeout_s + GRACE_S
        try:
            async with self._http.stream(
                "POST", _url(name, "/generate"), limit_s, HEADERS, content
            ) as answer:
                rest, finished = b"", False
                while chunk := await answer.chunk():
                    if answer.status >= 400:
                        rest += chunk
                        continue
                    *lines, rest = (rest + chunk).split(b"\n")
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
            raise EngineUnavailable("the engine does not answer") from error

    async def _call(
        self, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        try:
            status, headers, answer = await self._http.request(
                method, url, timeout_s, HEADERS, content
            )
            if status >= 400:
                raise error_of(status, answer, headers.get("retry-after"))
            parsed: dict[str, Any] = json.loads(answer) if answer else {}
            return parsed
        except (OSError, asyncio.TimeoutError) as error:
            raise EngineUnavailable("the engine does not answer") from error
        except ValueError as error:
            raise EngineUnavailable("the engine's answer is not JSON") from error


def _url(name: str, action: str = "") -> str:
    return f"/models/{quote(name, safe='')}{action}"
