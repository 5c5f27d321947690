"""The Open Inference Protocol (V2), for models of tensors and of texts.

GET  /v2, /v2/health/live, /v2/health/ready
GET  /v2/models/{name}                 what goes in and what comes out; loads the model
GET  /v2/models/{name}/ready, /config, /stats
POST /v2/models/{name}/infer
POST /v2/models/{name}/generate, /generate_stream   see `serving.api.v2.generate`
     /v2/models/{name}/versions/{version}/...       the same of the version that is loaded
GET  /v2/models/stats                               see `serving.api.v2.statistics`
POST /v2/repository/...                             see `serving.api.v2.repository`

A worker speaks the protocol itself (`handlers.tensors.v2`). Here are its routes, its errors and the
header with the length of the JSON in front of binary tensors, which a worker gets in the content
type.

https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import InvalidRequest, ServiceError, cut
from common.hints import timeout_s
from common.json_body import read_json
from common.media_types import BINARY, HEADER_SIZE
from serving.api.invoke import Check, describe, invoke
from serving.api.naming import described_models, may_call, name_model
from serving.api.shared import LARGE_BYTES, Gateway, Right, check_token, error_response
from serving.api.v2.generate import generate
from serving.api.v2.repository import Repository
from serving.api.v2.statistics import statistics
from serving.errors import (
    BadRequest,
    MethodNotAllowed,
    ModelNotFound,
    ResourceNotFound,
    Unavailable,
)
from serving.models.model import Model, State

NAME, VERSION = "kogpt2-serving", "0.1.0"
HEADER_LENGTH = "inference-header-content-length"

Endpoint = Callable[[Request], Awaitable[Response]]


class V2:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: list[Route] = []

    def routes(self) -> list[Route]:
        def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
            return Route(path, self._in_its_shape(endpoint), methods=[method])

        model = "/v2/models/{name:model}"
        version = model + "/versions/{version}"
        repository = Repository(self._gateway)
        self._known = [
            route("/v2", self.server),
            route("/v2/health/live", self.live),
            route("/v2/health/ready", self.ready),
            route("/v2/repository/index", repository.index, "POST"),
            route("/v2/repository/models/{name:model}/load", repository.load, "POST"),
            route("/v2/repository/models/{name:model}/unload", repository.unload, "POST"),
            route("/v2/models/stats", self.all_statistics),
            *(
                route(f"{path}/{action}", endpoint, method)
                for path in (version, model)
                for action, endpoint, method in (
                    ("infer", self.infer, "POST"),
                    ("generate", self.generate, "POST"),
                    ("generate_stream", self.generate_stream, "POST"),
                    ("ready", self.model_ready, "GET"),
                    ("config", self.config, "GET"),
                    ("stats", self.statistics, "GET"),
                )
            ),
            *(route(path, self.model) for path in (version, model)),
            *(
                route(f"{path}/trace/setting", self.no_traces, method)
                for path in ("/v2", model)
                for method in ("GET", "POST")
            ),
        ]
        rest = Route("/v2/{rest:path}", self._in_its_shape(self.unknown), methods=[])  # any
        return [*self._known, rest]

    @staticmethod
    def _in_its_shape(endpoint: Endpoint) -> Endpoint:
        """Converts errors, also those of workers, to `{"error": ...}`."""

        async def answer(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except ServiceError as error:
                response = error_response(request, error)
            if response.status_code >= 400:
                return as_error(response)
            return response

        return answer

    async def server(self, request: Request) -> Response:
        extensions = ["binary_tensor_data", "generate", "model_configuration"]
        extensions += ["model_repository", "statistics"]
        return JSONResponse({"name": NAME, "version": VERSION, "extensions": extensions})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        self._gateway.check_health()
        return JSONResponse({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        """Whether the model is loaded; asking loads nothing."""
        check_token(self._gateway, request, Right.CALL)
        name = request.path_params["name"]
        name_model(self._gateway, request, name)
        self._gateway.check_health()
        for named in described_models(self._gateway, name):
            model = await self._gateway.find(named)
            if model is None:
                raise Unavailable(f"Model {named} is not loaded yet; a request to it loads it")
            if model.state is not State.READY:
                raise Unavailable(f"Model {named} is {model.state.value}")
            _version_check(request)(model)
        return JSONResponse({"name": name, "ready": True})

    async def model(self, request: Request) -> Response:
        self._check_method(request)  # all of `sowol/infer` may be a model's name
        check_token(self._gateway, request, Right.CALL)
        name = request.path_params["name"]
        model = await describe(self._gateway, request, name, _version_check(request))
        return JSONResponse(_described(model.name, model.metadata))

    async def infer(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.CALL)
        headers = {"content-type": "application/json", "accept": "*/*"}
        length = request.headers.get(HEADER_LENGTH)
        if length is not None:
            if not (length.isascii() and length.isdecimal() and len(length) < 16):
                raise BadRequest(f"{HEADER_LENGTH} must be a number of bytes")
            headers["content-type"] = f"{BINARY};{HEADER_SIZE}={length}"

        async def limit(body: bytes) -> float:
            return await _limit_s(body if length is None else body[: int(length)])

        name, check = request.path_params["name"], _version_check(request)
        response = await invoke(self._gateway, request, name, headers, check, limit)
        kind, _, size = response.headers["content-type"].partition(f";{HEADER_SIZE}=")
        if kind == BINARY:
            response.headers["content-type"] = "application/octet-stream"
            response.headers[HEADER_LENGTH] = size
        return response

    async def generate(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.CALL)
        return await generate(self._gateway, request, False, _version_check(request))

    async def generate_stream(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.CALL)
        return await generate(self._gateway, request, True, _version_check(request))

    async def config(self, request: Request) -> Response:
        """Triton's configuration of a model, from the same that `model` tells."""
        check_token(self._gateway, request, Right.CALL)
        name = request.path_params["name"]
        model = await describe(self._gateway, request, name, _version_check(request))
        described = _described(model.name, model.metadata)
        sides = {"input": described["inputs"], "output": described["outputs"]}
        tensors = {side: [_configured(t) for t in listed] for side, listed in sides.items()}
        head = {"name": model.name, "platform": described["platform"], "max_batch_size": 0}
        policy = {"latest": {"num_versions": 1}}
        return JSONResponse({**head, "version_policy": policy, **tensors})

    async def statistics(self, request: Request) -> Response:
        """Of a model that is loaded; asking loads nothing."""
        check_token(self._gateway, request, Right.CALL)
        name = request.path_params["name"]
        name_model(self._gateway, request, name)
        named = described_models(self._gateway, name)
        models = [self._gateway.registry.get(model) for model in named]
        for model in models:
            _version_check(request)(model)
        return JSONResponse(await statistics(self._gateway, models))

    async def all_statistics(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.CALL)
        models = [m for m in self._gateway.registry.models() if may_call(request, m.name)]
        return JSONResponse(await statistics(self._gateway, models))

    async def no_traces(self, request: Request) -> Response:
        raise ResourceNotFound("there are no traces here; /metrics and the log tell of requests")

    async def unknown(self, request: Request) -> Response:
        self._check_method(request)
        raise ResourceNotFound("Requested resource is not found.")

    def _check_method(self, request: Request) -> None:
        """Raises `MethodNotAllowed` where the path has other methods."""
        path = request.scope["path"]
        first = next((route for route in self._known if route.path_regex.match(path)), None)
        same = [
            route.methods or set() for route in self._known if first and route.path == first.path
        ]
        methods = sorted(set().union(*same))
        if methods and request.method not in methods:
            raise MethodNotAllowed(f"{path} takes {', '.join(methods)}", methods)


async def _limit_s(body: bytes) -> float:
    """The seconds that a request's own `timeout` leaves it."""
    if b'"timeout"' not in body:
        return math.inf
    with contextlib.suppress(InvalidRequest):  # the worker says what is wrong
        value = await asyncio.to_thread(read_json, body)
        return timeout_s(value.get("parameters") if isinstance(value, dict) else None) or math.inf
    return math.inf


def _version_check(request: Request) -> Check:
    """Raises `ModelNotFound` for another version than the one that is loaded."""

    def check(model: Model) -> None:
        version = request.path_params.get("version")
        own = _described(model.name, model.metadata)["versions"][0]
        if version not in (None, own):
            raise ModelNotFound(f"Model {model.name} has version {own}, not {version[:50]}")

    return check


def _described(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A model's metadata. Own scripts tell nothing."""
    known = {"name": name, "versions": ["1"], "platform": "", "inputs": [], "outputs": []}
    return {**known, **metadata, "name": name}


def _configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    kind = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"]}


def as_error(response: Response) -> Response:
    """`{"code", "type", "message"}` as `{"error": message}`; the status and headers stay."""
    body = bytes(response.body[: LARGE_BYTES + 1])
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):  # a script's own words
        message = cut(body.decode("utf-8", "replace"), LARGE_BYTES)
    headers = {k: v for k, v in response.headers.items() if not k.startswith("content-")}
    text = json.dumps({"error": message}, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(text, response.status_code, headers, media_type="application/json")
