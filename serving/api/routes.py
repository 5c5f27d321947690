"""All routes of both ports: every contract's, health, metrics and the routes' description."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import orjson
from starlette.responses import HTMLResponse, JSONResponse, Response

from common.errors import EngineError
from common.media_types import JSON
from serving.api import adapters, inference, management, openapi
from serving.api.access import Right
from serving.api.gateway import Gateway
from serving.api.metrics import CONTENT_TYPE
from serving.api.naming import described_models
from serving.api.openai import routes as openai
from serving.api.request import Request
from serving.api.routing import Kind, Route
from serving.api.v2 import inference as v2


async def ping(gateway: Gateway, request: Request) -> Response:
    """Answer 200 when a request would work."""
    gateway.check_health()
    return JSONResponse({"status": "Healthy"})


async def metrics(gateway: Gateway, request: Request) -> Response:
    """Metrics for Prometheus."""
    statistics = None
    with contextlib.suppress(EngineError):
        statistics = await gateway.engine.statistics(timeout_s=2)
    names = gateway.registry.engine_names()
    waiting = {model.name: len(model.line.waiting) for model in gateway.registry.all()}
    # On a thread, as the text takes a fifth of a second with hundreds of models.
    text = await asyncio.to_thread(
        gateway.metrics.text, statistics, names, waiting, gateway.tokens.all(), gateway.aliases
    )
    return Response(text, media_type=CONTENT_TYPE)


async def describe(gateway: Gateway, request: Request) -> Response:
    described = document(managing=is_managing(gateway, request))
    return Response(orjson.dumps(described), media_type=JSON)


async def docs(gateway: Gateway, request: Request) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    headers = {"content-security-policy": policy}
    return HTMLResponse(_page(is_managing(gateway, request)), headers=headers)


async def describe_model(gateway: Gateway, request: Request) -> Response:
    """What a model takes and answers (Multi Model Server); loads nothing."""
    name = request.path_params["name"]
    for model in described_models(gateway, name):
        await gateway.find(model)
    return JSONResponse(openapi.of_model(document(), name))


def is_managing(gateway: Gateway, request: Request) -> bool:
    """Return whether a request came to a management port that is not the port for requests."""
    port: int = request.scope["server"][1]
    return port != gateway.settings.port


HEALTH, MODEL = Kind("health"), Kind("inference", Right.CALL)
COMMON = (
    Route("GET", "/ping", ping, HEALTH, "503"),
    Route("GET", "/health", ping, HEALTH, "503"),
    Route("GET", "/metrics", metrics, HEALTH),
    Route("GET", "/api-description", describe),
    Route("GET", "/openapi.json", describe),
    Route("GET", "/docs", docs),
    Route("OPTIONS", "/", describe),
)
MANAGEMENT = (*COMMON, *management.ROUTES, *adapters.ROUTES)
REQUESTS = (  # each is tried in turn
    *inference.ROUTES,
    Route("OPTIONS", "/predictions/{name:model}", describe_model, MODEL, "401 403 404 429"),
    *openai.ROUTES,
    *v2.ROUTES,
    *MANAGEMENT,
)


@functools.cache
def document(*, managing: bool = False) -> dict[str, Any]:
    """The OpenAPI document of the port for requests, or of a management port of its own."""
    return openapi.document(MANAGEMENT if managing else REQUESTS)


@functools.cache
def _page(managing: bool) -> str:
    return openapi.page(document(managing=managing))
