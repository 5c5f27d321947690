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
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from common.errors import EngineError
from common.hints import HINTS, timeout_s
from common.parameters import Parameters
from serving.api.gateway import Gateway
from serving.api.invoke import Check, engine_model
from serving.api.naming import name_model
from serving.api.stream import EVENTS, LATE, Item, TokenStream, begin, choice_logprobs, whole
from serving.api.v2.repository import read_object
from serving.errors import BadRequest

JSON = "application/json"


@dataclass(frozen=True)
class ParsedRequest:
    """A request as the engine and the answer need it.

    head: fields of every answer; before: the prompt, where it is a part of the answer
    """

    text: str
    parameters: dict[str, Any]
    head: dict[str, Any]
    before: str
    stream: bool
    limit_s: float


def parse(name: str, body: dict[str, Any], stream: bool) -> ParsedRequest:
    """Raises `BadRequest`, `InvalidRequest`."""
    text, id_ = body.get("text_input"), body.get("id")
    if isinstance(text, list) and len(text) == 1:
        (text,) = text
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise BadRequest("text_input must be text that is not empty, without NUL")
    if not isinstance(id_, str | None):
        raise BadRequest("id must be a string")
    beside = {k: v for k, v in body.items() if k not in ("id", "text_input", "parameters")}
    within = body.get("parameters") or {}
    if not isinstance(within, dict):
        raise BadRequest("parameters must be an object")
    parameters = {**beside, **within}
    stream = parameters.pop("stream", stream)
    if not isinstance(stream, bool):
        raise BadRequest("stream must be true or false")
    limit_s = timeout_s(parameters) or math.inf
    for hint in HINTS:
        parameters.pop(hint, None)
    alone = parameters.pop("exclude_input_in_output", True)
    if not isinstance(alone, bool):
        raise BadRequest("exclude_input_in_output must be true or false")
    if "max_tokens" in parameters:
        parameters.setdefault("max_new_tokens", parameters.pop("max_tokens"))
    # That answers be drawn may be the model's own default, which the engine knows.
    checked = Parameters.parse(parameters, {"do_sample": True})
    if stream and checked.num_return_sequences > 1:
        raise BadRequest("num_return_sequences must be 1 in a stream, which has one text")
    head = {"model_name": name, "model_version": "1"}
    before = text if not alone or checked.return_full_text else ""
    head = head if id_ is None else {"id": id_, **head}
    return ParsedRequest(text, parameters, head, before, stream, limit_s)


async def generate(gateway: Gateway, request: Request, stream: bool, check: Check) -> Response:
    gateway.check_ready()
    name = request.path_params["name"]
    name_model(gateway, request, name)
    body = await read_object(gateway, request)
    parsed = parse(name, body, stream)
    async with (
        AsyncExitStack() as resources,
        engine_model(gateway, request, name, resources, check, parsed.limit_s) as (model, end),
    ):
        parsed.head["model_name"] = model.name
        await resources.enter_async_context(gateway.admission.place(model.line, end))
        if parsed.stream:
            given = parsed.text, parsed.parameters
            items, first = await begin(gateway, model, *given, end, resources)
            late = _event(_error(LATE))
            pieces = _events(parsed, first, items)
            return TokenStream(pieces, EVENTS, end, lambda: late, resources.pop_all())

        answer = await whole(gateway, model, parsed.text, parsed.parameters, end)
        texts = [parsed.before + completion["text"] for completion in answer["completions"]]
        output = texts[0] if len(texts) == 1 else texts
        labels = choice_logprobs(answer["completions"][0])
        value = {**parsed.head, "text_output": output, **labels}
        if stream:  # a client of /generate_stream reads events
            return Response(_event(value), media_type=EVENTS)
        return Response(orjson.dumps(value), media_type=JSON)
    raise AssertionError("it was returned or raised")


async def _events(
    parsed: ParsedRequest, first: Item, items: AsyncIterator[Item]
) -> AsyncIterator[bytes]:
    yield _event({**parsed.head, "text_output": parsed.before + first["text"]})
    try:
        async for item in items:
            if item["text"]:
                yield _event({**parsed.head, "text_output": item["text"]})
    except EngineError as error:
        yield _event(_error(error))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _error(error: EngineError) -> dict[str, Any]:
    return {"error": error.message}
