"""Bodies of OpenAI's and TGI's APIs on SageMaker's and Multi Model Server's routes.

SageMaker has no other routes. The fields of a body tell whose it is, and it is answered in that
API's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest, ServiceError, UnsupportedMediaType
from common.json_body import MAX_VALUES, read_json
from common.media_types import JSON, media_type
from serving.api import tgi
from serving.api.error_responses import error_response, tgi_body
from serving.api.gateway import Gateway
from serving.api.invoke import Direct, check_engine
from serving.api.naming import choose_model, name_model
from serving.api.openai import parsing
from serving.api.openai.answering import answer as answer_openai
from serving.api.openai.answers import Answer
from serving.api.openai.errors import error_body
from serving.api.stream import open_stream, wanted
from serving.models.model import Model

MARKS = (b'"messages"', b'"prompt"', b'"details"', b'"grammar"', b'"adapter_id"')


def read(request: Request, body: bytes, headers: Mapping[str, str]) -> Direct | None:
    """Parses a body that the engine answers directly; None for one that the worker answers."""
    agent = request.headers.get("user-agent", "")
    if tgi.CLIENT in agent or any(mark in body for mark in MARKS):
        with suppress(InvalidRequest, UnsupportedMediaType):  # the worker says what is wrong
            value = _object(body, headers.get("content-type"))
            if "inputs" not in value and ("messages" in value or "prompt" in value):
                return _openai(value)
            if tgi.is_meant(value, agent):
                return _tgi(value)
    streamed = wanted(body, headers)
    if streamed is None:
        return None

    async def answer(
        gateway: Gateway, _: Request, model: Model, end: float, resources: AsyncExitStack
    ) -> Response:
        await resources.enter_async_context(gateway.admission.place(model.line, end))
        accept = headers.get("accept", "")
        return await open_stream(gateway, model, streamed, accept, end, resources)

    return Direct(answer)


def _object(body: bytes, content_type: str | None) -> dict[str, Any]:
    value = read_json(body, MAX_VALUES) if media_type(content_type)[0] == JSON else None
    return value if isinstance(value, dict) else {}


def _openai(body: dict[str, Any]) -> Direct:
    async def answer(
        gateway: Gateway, request: Request, model: Model, end: float, resources: AsyncExitStack
    ) -> Response:
        try:
            parse = parsing.chat if "messages" in body else parsing.completion
            parsed = parse({**body, "model": model.name})
            form = Answer(parsed, model.name)
            return await answer_openai(gateway, model, parsed, form, end, resources)
        except Exception as error:
            return error_response(request, error, error_body)

    named = body.get("model")
    return Direct(answer, named if isinstance(named, str) else "", parsing.user(body))


def read_tgi(request: Request, body: bytes, headers: Mapping[str, str], *, stream: bool) -> Direct:
    """The same of a body of TGI's own routes. Raises `InvalidRequest`."""
    value = _object(body, headers.get("content-type"))
    if not isinstance(value.get("inputs"), str):
        raise InvalidRequest("the body must be a JSON object with inputs, which must be text")
    return replace(_tgi({**value, "stream": stream}), model=tgi.adapter_of(value))


def _tgi(body: dict[str, Any]) -> Direct:
    async def answer(
        gateway: Gateway, request: Request, model: Model, end: float, resources: AsyncExitStack
    ) -> Response:
        try:
            parsed = tgi.parse(body)
            if parsed.adapter and parsed.adapter not in (model.name, request.state.alias):
                name_model(gateway, request, parsed.adapter)
                name = choose_model(gateway, request, parsed.adapter)
                model = await resources.enter_async_context(gateway.use(name))
                request.state.counted.model = model.name
                check_engine(model)
                end = min(end, request.state.started + model.request_timeout_s)
            return await tgi.answer(gateway, model, parsed, end, resources)
        except ServiceError as error:
            return error_response(request, error, tgi_body)

    return Direct(answer)
