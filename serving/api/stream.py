"""Streams a text while it is generated: `{"inputs": ..., "stream": true}`.

Multi Model Server cannot stream, so the tokens come from the engine directly, as server-sent events
or, for `Accept: application/x-ndjson`, as JSON lines:

    {"text", "token", "index", "logprobs"?}                       each token
    {"generated_text", "tokens", "finish_reason", "index"}        the end of each sequence
    {"error": {"code", "type", "message"}}                        if it breaks off
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

from common.errors import EngineError, NotAcceptable, ServiceError
from common.media_types import JSON, ranges
from handlers.payload import GenerateRequest, parse
from serving.api.answering import Renderer
from serving.api.engine_calls import Item
from serving.api.routing import EVENTS

LINES = "application/x-ndjson"


def wanted(body: bytes, headers: Mapping[str, str]) -> GenerateRequest | None:
    """Parse a body and return its request if it is for a stream, else None."""
    if b'"stream"' not in body:
        return None
    with suppress(EngineError):  # the worker reports the error
        request = parse(body, headers.get("content-type"))
        return request if request.stream else None
    return None


class Stream(Renderer):
    def __init__(self, request: GenerateRequest, accept: str) -> None:
        """Raise `NotAcceptable` if `accept`, the header, excludes both media types of streams."""
        self.stream_type = _kind(accept)
        self._full = ""
        if isinstance(request.inputs, str) and request.parameters.get("return_full_text"):
            self._full = request.inputs
        self._texts: defaultdict[int, list[str]] = defaultdict(list)

    def write(self, item: Item) -> bytes:
        texts = self._texts[item["index"]]
        texts.append(item["text"])
        reason = item.pop("finish_reason", None)
        for name in ("prompt_tokens", "cached_tokens"):
            item.pop(name, None)
        sent = self._encode(item)
        if reason is not None:
            text = self._full + "".join(texts)
            end = {"generated_text": text, "tokens": len(texts), "finish_reason": reason}
            sent += self._encode({**end, "index": item["index"]})
        return sent

    def broken(self, error: ServiceError) -> bytes:
        return self._encode({"error": error.to_body()})

    def _encode(self, item: Item) -> bytes:
        text = json.dumps(item, ensure_ascii=False).encode("utf-8", "replace")
        return text + b"\n" if self.stream_type == LINES else b"data: " + text + b"\n\n"


def _kind(accept: str) -> str:
    """Return the media type of a stream by an Accept header. Raises `NotAcceptable`."""
    accepted = {kind for kind, weight in ranges(accept).items() if weight}
    if LINES in accepted:
        return LINES
    # Some clients always send `Accept: application/json`; the body's `stream` has precedence.
    if accepted & {"*/*", "text/*", JSON, EVENTS}:
        return EVENTS
    raise NotAcceptable(f"Accept is {accept}, can be {EVENTS} or {LINES} for a stream")
