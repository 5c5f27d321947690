"""The routes, for any client of OpenAI's.

GET  /v1/models, /v1/models/{id}    what the store offers and what is loaded
POST /v1/completions                continues texts or token ids
POST /v1/chat/completions           answers a chat, by the fine-tune's own template
POST /v1/responses                  answers a chat, in the format of the Responses API
POST /tokenize, /detokenize         converts texts to token ids and back, in vLLM's format
POST /v1/embeddings                 refused
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from common.media_types import JSON
from serving.api.access import Right
from serving.api.answering import Renderer, answer
from serving.api.gateway import Gateway
from serving.api.invoke import engine_model
from serving.api.naming import described_models, listed_aliases, may_call
from serving.api.openai import parsing, responses, tokens
from serving.api.openai.answers import Answer
from serving.api.openai.errors import UnknownUrl
from serving.api.openai.parsing import Body, ParsedRequest, user
from serving.api.request import Request
from serving.api.request_body import read_json_object
from serving.api.routing import ANY, CALL, EVENTS, FIND, Kind, Route
from serving.models.model import Model
from serving.names import normal_name

Parsed = TypeVar("Parsed", bound=ParsedRequest)
OWNER = "kogpt2-serving"
CREATED = int(time.time())
KNOWN = "GET /v1/models, POST /v1/completions, POST /v1/chat/completions, POST /v1/responses"
NO_EMBEDDINGS = (
    "there are no embeddings here: the hidden states of a GPT-2 were never trained to tell how"
    " alike texts are"
)
STATELESS = "no response is kept here: POST /v1/responses with the whole input"
NOT_DONE = {"/v1/embeddings": NO_EMBEDDINGS, "/v1/responses/": STATELESS}


async def list_models(gateway: Gateway, request: Request) -> Response:
    """List the models of the store."""
    names = {model.name for model in gateway.registry.models()}
    if not gateway.settings.sagemaker_multi_model:
        names |= {model.name for model in await gateway.lookups.models()}
    aliases = listed_aliases(gateway, request)
    names = {name for name in names if may_call(gateway, request, name)} | aliases.keys()
    data = [_model(gateway, name, aliases.get(name)) for name in sorted(names)]
    return JSONResponse({"object": "list", "data": data})


async def find_model(gateway: Gateway, request: Request) -> Response:
    """Describe a model of the store, without loading it."""
    name = request.path_params["name"]
    for named in described_models(gateway, name):
        await gateway.find(named)
    alias = gateway.aliases.find(name)
    return JSONResponse(_model(gateway, name, alias.weights if alias is not None else None))


def _model(gateway: Gateway, name: str, alias_of: Mapping[str, float] | None) -> dict[str, Any]:
    """Describe a model, a loaded classifier with its `task`: it has no completions."""
    entry = {"id": name, "object": "model", "created": CREATED, "owned_by": OWNER}
    loaded = gateway.registry.find(name)
    if loaded is not None and loaded.task:
        entry["task"] = loaded.task
    return entry if alias_of is None else {**entry, "alias_of": alias_of}


async def complete(gateway: Gateway, request: Request) -> Response:
    """Continue texts or token ids."""
    return await _answer(gateway, request, parsing.completion, Answer)


async def chat(gateway: Gateway, request: Request) -> Response:
    """Answer a chat."""
    return await _answer(gateway, request, parsing.chat, Answer)


async def respond(gateway: Gateway, request: Request) -> Response:
    """Answer a chat, as the Responses API has it."""
    return await _answer(gateway, request, responses.parse, responses.Response)


async def _answer(
    gateway: Gateway,
    request: Request,
    parse: Callable[[Body], Parsed],
    renderer: Callable[[Parsed, str], Renderer],
) -> Response:
    body = await read_json_object(gateway, request)
    parsed = parse(body)
    name = normal_name(parsed.model).lstrip("/")
    async with engine_model(gateway, request, name, user=user(body)) as (model, end, resources):
        return await answer(gateway, model, parsed, renderer(parsed, model.name), end, resources)


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """A text or a chat as token ids, as vLLM has it."""
    return await _of_tokens(gateway, request, tokens.tokenize)


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """Token ids as text."""
    return await _of_tokens(gateway, request, tokens.detokenize)


async def _of_tokens(
    gateway: Gateway,
    request: Request,
    convert: Callable[[Gateway, Model, Body, float], Awaitable[dict[str, Any]]],
) -> Response:
    body = await read_json_object(gateway, request)
    named = parsing.text("model", body.get("model") or gateway.single_model)
    async with engine_model(gateway, request, normal_name(named).lstrip("/")) as (model, end, _):
        return JSONResponse(await convert(gateway, model, body, end))


async def unknown(gateway: Gateway, request: Request) -> Response:
    path = request.url.path
    if (known := next(filter(path.startswith, NOT_DONE), None)) is not None:
        raise UnknownUrl(NOT_DONE[known])
    raise UnknownUrl(f"Unknown request URL: {request.method} {path}; known are {KNOWN}")


def _texts(sent: str) -> Kind:
    return Kind("OpenAI", Right.CALL, "OpenAIError", {JSON: sent}, {JSON: "Any", EVENTS: "Any"})


LOOKUP = Kind("OpenAI", Right.CALL, "OpenAIError")
TOKENS = Kind("OpenAI", Right.CALL, "OpenAIError", {JSON: "Any"}, {JSON: "Any"})
ROUTES = (
    Route("GET", "/v1/models", list_models, LOOKUP, "401 403 429 503"),
    Route("GET", "/v1/models/{name:model}", find_model, LOOKUP, FIND),
    Route("POST", "/v1/completions", complete, _texts("OpenAICompletion"), CALL),
    Route("POST", "/v1/chat/completions", chat, _texts("OpenAIChat"), CALL),
    Route("POST", "/v1/responses", respond, _texts("OpenAIResponse"), CALL),
    Route("POST", "/tokenize", tokenize, TOKENS, CALL),
    Route("POST", "/detokenize", detokenize, TOKENS, CALL),
    Route(ANY, "/v1/{rest:path}", unknown, Kind("", Right.CALL)),
)
