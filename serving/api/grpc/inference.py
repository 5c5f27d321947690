"""The service `inference.GRPCInferenceService`; each method calls its HTTP route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from google.protobuf.json_format import ParseDict

from serving.api.grpc.calls import (
    Answering,
    Call,
    Idle,
    Reply,
    RouteError,
    Routes,
    Unread,
    service,
    trailing,
)
from serving.api.grpc.convert import from_http, parameters, to_http
from serving.api.grpc.messages import message, methods
from serving.api.request_body import off_loop
from serving.api.v2.inference import HEADER_LENGTH

SERVICE = "inference.GRPCInferenceService"
TEXT_PLATFORM = "kogpt2"


def model_path(name: str, version: str, action: str = "") -> str:
    """Return the path of a model's route; `action` is empty or begins with a slash."""
    return f"/v2/models/{name}{f'/versions/{version}' if version else ''}{action}"


def _stored(request: Any) -> str:
    """Return the name of a model to load or unload, from Triton's field or from KServe's."""
    return str(request.model_name or request.repository_name)


def _repository(request: Any, action: str) -> Call:
    body = orjson.dumps({"parameters": parameters(request.parameters)}, default=repr)
    return Call(f"/v2/repository/models/{_stored(request)}/{action}", "POST", body)


# The route's request for each method without tensors. Messages have the fields of the route's JSON,
# except for the methods in SHAPED.
CALLS: dict[str, Callable[[Any], Call]] = {
    "ServerLive": lambda r: Call("/v2/health/live"),
    "ServerReady": lambda r: Call("/v2/health/ready"),
    "ServerMetadata": lambda r: Call("/v2"),
    "ModelReady": lambda r: Call(model_path(r.name, r.version, "/ready")),
    "ModelMetadata": lambda r: Call(model_path(r.name, r.version)),
    "ModelConfig": lambda r: Call(model_path(r.name, r.version, "/config")),
    "ModelStatistics": lambda r: Call(
        model_path(r.name, r.version, "/stats") if r.name else "/v2/models/stats"
    ),
    "RepositoryIndex": lambda r: Call(
        "/v2/repository/index", "POST", orjson.dumps({"ready": r.ready})
    ),
    "RepositoryModelLoad": lambda r: _repository(r, "load"),
    "RepositoryModelUnload": lambda r: _repository(r, "unload"),
}
# Statuses of routes that mean "not ready", which gRPC's methods answer without an error.
NOT_READY = {"ServerReady": (503,), "ModelReady": (404, 503)}


def _config(request: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Convert a model's configuration; text models are "decoupled", as they stream answers."""
    policy = {"decoupled": body["platform"] == TEXT_PLATFORM}
    return {"config": {**body, "model_transaction_policy": policy}}


SHAPED: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "ModelConfig": _config,
    "RepositoryIndex": lambda r, body: {"models": body},
    "RepositoryModelLoad": lambda r, body: {"model_name": _stored(r), "isLoaded": True},
    "RepositoryModelUnload": lambda r, body: {"model_name": _stored(r), "isUnloaded": True},
}


def handlers(routes: Routes, stream: Answering, idle: Idle, unread: Unread) -> Any:
    """Return the service's handler; `stream` answers ModelStreamInfer."""
    answers = {name: _describe(routes, name, unread) for name in CALLS}
    answers |= {"ModelInfer": _infer(routes, unread), "ModelStreamInfer": stream}
    return service(SERVICE, answers, idle)


def _describe(routes: Routes, name: str, unread: Unread) -> Answering:
    answer_type = message(methods(SERVICE)[name].output_type.full_name)

    async def answer(request: Any, context: Any) -> Any:
        try:
            reply = await routes.ask(CALLS[name](request), context.invocation_metadata())
        except RouteError as error:
            if error.status not in NOT_READY.get(name, ()):
                raise
            context.set_trailing_metadata(trailing(error.headers))
            return answer_type()
        context.set_trailing_metadata(trailing(reply.headers))
        body = orjson.loads(reply.body or b"{}")
        shaped = SHAPED[name](request, body) if name in SHAPED else body
        response = ParseDict(shaped, answer_type(), ignore_unknown_fields=True)
        return unread.answer(response, context)

    return answer


def _infer(routes: Routes, unread: Unread) -> Answering:
    async def answer(request: Any, context: Any) -> Any:
        reply = await infer(routes, request, context.invocation_metadata())
        context.set_trailing_metadata(trailing(reply.headers))  # of an answer that is wrong, too
        return unread.answer(await converted(reply), context)

    return answer


async def infer(routes: Routes, request: Any, metadata: Any, model: str = "") -> Reply:
    """Call the infer route; `model` is the model already chosen for an alias, or ""."""
    body, headers = await off_loop(request.ByteSize(), to_http, request)
    path = model_path(request.model_name, request.model_version, "/infer")
    return await routes.ask(Call(path, "POST", body, headers, model), metadata)


async def converted(reply: Reply) -> Any:
    """Convert an answer of the infer route to its message. Raises `WorkerFailed`."""
    length = reply.headers.get(HEADER_LENGTH)
    return await off_loop(len(reply.body), from_http, reply.body, length)
