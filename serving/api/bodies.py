"""Parses bodies of OpenAI's and TGI's APIs on SageMaker's and Multi Model Server's routes.

SageMaker has no routes for these APIs, so the fields of a body show to which API it belongs. The
answer has the format of that API.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from common.errors import InvalidRequest, UnsupportedMediaType
from common.json_body import MAX_VALUES, read_json
from common.media_types import JSON, media_type
from serving.api import tgi
from serving.api.answering import EngineRequest, Renderer
from serving.api.error_responses import tgi_body
from serving.api.invoke import Direct
from serving.api.openai import parsing
from serving.api.openai.answers import Answer
from serving.api.openai.errors import error_body
from serving.api.request import Request
from serving.api.stream import Stream, wanted

MARKS = (b'"messages"', b'"prompt"', b'"details"', b'"grammar"', b'"adapter_id"')


def read(request: Request, body: bytes, headers: Mapping[str, str]) -> Direct:
    """Parse a body that the engine can answer directly; return an empty `Direct` for others."""
    agent = request.headers.get("user-agent", "")
    if tgi.CLIENT in agent or any(mark in body for mark in MARKS):
        with suppress(InvalidRequest, UnsupportedMediaType):  # the worker reports the error
            value = _object(body, headers.get("content-type"))
            if "inputs" not in value and ("messages" in value or "prompt" in value):
                return _openai(value)
            if tgi.is_meant(value, agent):
                return _tgi(value)
    if (streamed := wanted(body, headers)) is None:
        return Direct()

    def parse(_: str) -> tuple[EngineRequest, Renderer]:
        request = EngineRequest(
            prompts=[streamed.inputs], parameters=streamed.parameters, stream=True
        )
        return request, Stream(streamed, headers.get("accept", ""))

    return Direct(parse, streams=True)


def _object(body: bytes, content_type: str | None) -> dict[str, Any]:
    value = read_json(body, MAX_VALUES) if media_type(content_type)[0] == JSON else None
    return value if isinstance(value, dict) else {}


def _openai(body: dict[str, Any]) -> Direct:
    def parse(model: str) -> tuple[EngineRequest, Renderer]:
        parsed = (parsing.chat if "messages" in body else parsing.completion)(
            {**body, "model": model}
        )
        return parsed, Answer(parsed, model)

    named = body.get("model")
    model = named if isinstance(named, str) else ""
    return Direct(parse, error_body, model, parsing.user(body))


def read_tgi(request: Request, body: bytes, headers: Mapping[str, str], *, stream: bool) -> Direct:
    """Parse a body of TGI's own routes. Raises `InvalidRequest`."""
    value = _object(body, headers.get("content-type"))
    if not isinstance(value.get("inputs"), str):
        raise InvalidRequest("the body must be a JSON object with inputs, which must be text")
    return replace(_tgi({**value, "stream": stream}), model=tgi.adapter_of(value))


def _tgi(body: dict[str, Any]) -> Direct:
    def parse(_: str) -> tuple[EngineRequest, Renderer]:
        parsed = tgi.parse(body)
        return parsed, tgi.Text(parsed)

    return Direct(parse, tgi_body)
