"""Triton's generate extension: one text in, the generated one out.

POST /v2/models/{name}/generate          {"text_input", "parameters"?, "id"?}
POST /v2/models/{name}/generate_stream   the same, the text in pieces, as server-sent events

    -> {"id"?, "model_name", "model_version", "text_output"}

Parameters are those of `/predictions`, and of Triton's own: `timeout` and the other hints of
`/infer`; `max_tokens`, `stream` (which overrides the route) and `exclude_input_in_output`. Each may
stand beside `text_input` instead.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from common import fields
from common.errors import ServiceError
from common.hints import HINTS, timeout_s
from common.media_types import JSON
from common.parameters import Parameters
from serving.api.answering import EngineRequest, Renderer, answer, event
from serving.api.engine_calls import Item, choice_logprobs
from serving.api.gateway import Gateway
from serving.api.invoke import engine_model
from serving.api.request import Request
from serving.api.request_body import read_json_object
from serving.api.routing import EVENTS
from serving.errors import BadRequest


@dataclass(frozen=True, kw_only=True)
class ParsedRequest(EngineRequest):
    """A request to the engine, and the options of its answer in Triton's format.

    head: the request's id as a field of every answer, if it has one
    before: the prompt if the answer begins with it, else ""
    """

    head: dict[str, str]
    before: str
    limit_s: float


def parse(body: dict[str, Any], stream: bool) -> ParsedRequest:
    """Parse a body of Triton's generate extension. Raises `BadRequest`, `InvalidRequest`."""
    text, id_ = body.get("text_input"), body.get("id")
    if isinstance(text, list) and len(text) == 1:
        (text,) = text
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise BadRequest("text_input must be text that is not empty, without NUL")
    if not isinstance(id_, str | None):
        raise BadRequest("id must be a string")
    beside = {k: v for k, v in body.items() if k not in ("id", "text_input", "parameters")}
    within = fields.mapping("parameters", body.get("parameters") or {})
    parameters = {**beside, **within}
    stream = fields.boolean("stream", parameters.pop("stream", stream))
    limit_s = timeout_s(parameters) or math.inf
    for hint in HINTS:
        parameters.pop(hint, None)
    alone = parameters.pop("exclude_input_in_output", True)
    fields.boolean("exclude_input_in_output", alone)
    if "max_tokens" in parameters:
        parameters.setdefault("max_new_tokens", parameters.pop("max_tokens"))
    # Sampling may be the model's own default, which only the engine knows.
    checked = Parameters.parse(parameters, {"do_sample": True})
    if stream and checked.num_return_sequences > 1:
        raise BadRequest("num_return_sequences must be 1 in a stream, which has one text")
    return ParsedRequest(
        prompts=[text],
        parameters=parameters,
        stream=stream,
        head={} if id_ is None else {"id": id_},
        before=text if not alone or checked.return_full_text else "",
        limit_s=limit_s,
    )


class Text(Renderer):
    """Writes answers in Triton's format; with `as_events`, a whole answer is one event, too."""

    def __init__(self, parsed: ParsedRequest, model: str, as_events: bool) -> None:
        self._head = {**parsed.head, "model_name": model, "model_version": "1"}
        self._before, self._begun = parsed.before, False
        self.whole_type = EVENTS if as_events else JSON

    def whole(self, results: Sequence[Mapping[str, Any]]) -> bytes:
        completions = results[0]["completions"]
        texts = [self._before + completion["text"] for completion in completions]
        output = texts[0] if len(texts) == 1 else texts
        value = {**self._head, "text_output": output, **choice_logprobs(completions[0])}
        return event(value) if self.whole_type == EVENTS else orjson.dumps(value)

    def write(self, item: Item) -> bytes:
        before, self._before = self._before, ""
        if self._begun and not item["text"]:
            return b""
        self._begun = True
        return event({**self._head, "text_output": before + item["text"]})

    def broken(self, error: ServiceError) -> bytes:
        return event({"error": error.message})


async def generate(gateway: Gateway, request: Request, stream: bool) -> Response:
    gateway.check_ready()
    name = request.path_params["name"]
    parsed = parse(await read_json_object(gateway, request, of_any_type=True), stream)
    async with engine_model(gateway, request, name, parsed.limit_s) as (model, end, resources):
        renderer = Text(parsed, model.name, as_events=stream)
        return await answer(gateway, model, parsed, renderer, end, resources)
