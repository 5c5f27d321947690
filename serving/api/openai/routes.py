"""The routes, for any client of OpenAI's.

GET  /v1/models, /v1/models/{id}    what the store offers and what is loaded
POST /v1/completions                continues texts or token ids
POST /v1/chat/completions           answers a chat, by the fine-tune's own template
POST /v1/responses                  the same as the Responses API has it
POST /tokenize, /detokenize         a text's ids, as vLLM has them
POST /v1/embeddings                 refused
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.api.invoke import engine_model
from serving.api.naming import described_models, listed_aliases, may_call, name_model
from serving.api.openai import parsing, responses, tokens
from serving.api.openai.answering import Form, answer
from serving.api.openai.answers import Answer
from serving.api.openai.errors import UnknownUrl, respond
from serving.api.openai.parsing import Body, ParsedRequest, user
from serving.api.shared import Gateway, Right, check_token, read_json_object
from serving.errors import MethodNotAllowed
from serving.models.model import Model
from serving.names import normal_name

OWNER = "kogpt2-serving"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
KNOWN = "GET /v1/models, POST /v1/completions, POST /v1/chat/completions, POST /v1/responses"
NO_EMBEDDINGS = (
    "there are no embeddings here: the hidden states of a GPT-2 were never trained to tell how"
    " alike texts are"
)

Endpoint = Callable[[Request], Awaitable[Response]]


class OpenAI:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            self._route("/v1/models", self.models, "GET"),
            self._route("/v1/models/{name:model}", self.model, "GET"),
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/responses", self.responses, "POST"),
            self._route("/tokenize", self.tokenize, "POST"),
            self._route("/detokenize", self.detokenize, "POST"),
            self._route("/v1/embeddings", self.embeddings, "POST"),
            self._route("/v1/{rest:path}", self.unknown, *METHODS),
        ]

    def _route(self, path: str, endpoint: Endpoint, *methods: str) -> Route:
        async def answered(request: Request) -> Response:
            try:
                if request.method not in (*methods, "HEAD"):
                    path = request.scope["path"]
                    raise MethodNotAllowed(f"{path} takes {', '.join(methods)}", methods)
                check_token(self._gateway, request, Right.CALL)
                return await endpoint(request)
            except Exception as error:
                return respond(request, error)

        # What is below /v1 is OpenAI's, wrong methods too.
        return Route(path, answered, methods=METHODS if path.startswith("/v1/") else methods)

    async def models(self, request: Request) -> Response:
        gateway = self._gateway
        names = {model.name for model in gateway.registry.models()}
        if not gateway.settings.sagemaker_multi_model:
            names |= {model.name for model in await gateway.lookups.models()}
        aliases = listed_aliases(gateway, request)
        names = {name for name in names if may_call(request, name)} | aliases.keys()
        data = [self._model(name, aliases.get(name)) for name in sorted(names)]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Asking loads nothing."""
        name = request.path_params["name"]
        name_model(self._gateway, request, name)
        for named in described_models(self._gateway, name):
            await self._gateway.find(named)
        alias = self._gateway.aliases.find(name)
        return JSONResponse(self._model(name, alias.weights if alias is not None else None))

    def _model(self, name: str, alias_of: Mapping[str, float] | None) -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}
        return entry if alias_of is None else {**entry, "alias_of": alias_of}

    async def completions(self, request: Request) -> Response:
        body = await read_json_object(self._gateway, request)
        parsed = parsing.completion(body)
        return await self._answer(request, body, parsed, lambda name: Answer(parsed, name))

    async def chat(self, request: Request) -> Response:
        body = await read_json_object(self._gateway, request)
        parsed = parsing.chat(body)
        return await self._answer(request, body, parsed, lambda name: Answer(parsed, name))

    async def responses(self, request: Request) -> Response:
        body = await read_json_object(self._gateway, request)
        parsed, given = responses.parse(body)
        return await self._answer(
            request, body, parsed, lambda name: responses.Response(parsed, given, name)
        )

    async def _answer(
        self, request: Request, body: Body, parsed: ParsedRequest, form: Callable[[str], Form]
    ) -> Response:
        """Loads the model first where that is allowed, as `serving.api.invoke` does."""
        gateway = self._gateway
        gateway.check_ready()
        name = normal_name(parsed.model).lstrip("/")
        async with (
            AsyncExitStack() as resources,
            engine_model(gateway, request, name, resources, user=user(body)) as (model, end),
        ):
            return await answer(gateway, model, parsed, form(model.name), end, resources)
        raise AssertionError("it was returned or raised")

    async def tokenize(self, request: Request) -> Response:
        return await self._of_tokens(request, tokens.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._of_tokens(request, tokens.detokenize)

    async def _of_tokens(
        self,
        request: Request,
        work: Callable[[Gateway, Model, parsing.Body, float], Awaitable[dict[str, Any]]],
    ) -> Response:
        gateway = self._gateway
        body = await read_json_object(gateway, request)
        gateway.check_ready()
        named = parsing.text("model", body.get("model") or gateway.single_model)
        name = normal_name(named).lstrip("/")
        async with (
            AsyncExitStack() as resources,
            engine_model(gateway, request, name, resources) as (model, end),
        ):
            return JSONResponse(await work(gateway, model, body, end))
        raise AssertionError("it was returned or raised")

    async def embeddings(self, request: Request) -> Response:
        raise UnknownUrl(NO_EMBEDDINGS)

    async def unknown(self, request: Request) -> Response:
        if request.url.path.startswith("/v1/responses/"):
            raise UnknownUrl("no response is kept here: POST /v1/responses with the whole input")
        raise UnknownUrl(
            f"Unknown request URL: {request.method} {request.url.path}; known are {KNOWN}"
        )
