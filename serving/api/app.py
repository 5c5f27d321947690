"""The application on both ports: every contract's routes, an id and a log line for each request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import EngineError, ServiceError
from common.worker_protocol import REQUEST_ID, SERVED_MODEL
from serving.api import openapi
from serving.api.adapters import Adapters
from serving.api.http_protocol import HEALTH_PATHS
from serving.api.inference import Inference
from serving.api.management import Management
from serving.api.metrics import CONTENT_TYPE
from serving.api.openai.errors import respond
from serving.api.openai.routes import OpenAI
from serving.api.shared import Gateway, error_response
from serving.api.sites import check_host, check_site
from serving.api.v2.inference import V2, as_error
from serving.console.routes import Console
from serving.errors import MethodNotAllowed, ResourceNotFound, ServingError

logger = logging.getLogger(__name__)

GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")


class App:
    """The two ports' routes over one `Gateway`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        health = [
            Route("/ping", self._ping, methods=["GET"]),
            Route("/health", self._ping, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        management = [*Management(gateway).routes(), *Adapters(gateway).routes()]
        documents = [
            Route("/api-description", self._openapi, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            Route("/docs", self._docs, methods=["GET"]),
            Route("/", self._openapi, methods=["OPTIONS"]),
        ]
        both = [*health, *documents]
        self._inference = self._app(
            [
                *Inference(gateway).routes(),  # each is tried in turn
                *both,
                *Console(gateway).routes(),
                *OpenAI(gateway).routes(),
                *V2(gateway).routes(),
                *management,
            ]
        )
        self._management = self._app([*both, *management])

    @staticmethod
    def _app(routes: Sequence[Route]) -> ASGIApp:
        app = Starlette(
            routes=list(routes),
            exception_handlers={
                ServiceError: error_response,
                HTTPException: _http_error,
                Exception: error_response,
            },
        )
        app.router.redirect_slashes = False
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.monotonic()
        scope["state"] = {
            "request_id": _request_id(scope),
            "model": None,
            "alias": None,  # the name that was sent, where it is one
            "token": None,  # of TOKENS_FILE, once it has begun
            "token_name": None,
            "started": started,
            "body_bytes": 0,
        }
        request_id: str = scope["state"]["request_id"]
        status = 0

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (REQUEST_ID.encode(), request_id.encode()),
                ]
                if scope["state"]["alias"] is not None:
                    served = quote(scope["state"]["model"], errors="replace")
                    message["headers"].append((SERVED_MODEL.encode(), served.encode()))
            await send(message)

        if scope["path"] not in HEALTH_PATHS:
            await self._gateway.take_over(self._gateway.settings.request_timeout_s)
        app = self._management if self._is_managing(scope) else self._inference
        try:
            self._check(Request(scope))
        except ServiceError as error:
            app = _refused(Request(scope), error)
        try:
            await app(scope, receive, send_with_id)
        except Exception:  # answered already, by the handler for Exception
            if status == 0:
                raise
        finally:
            self._gateway.body_bytes -= scope["state"]["body_bytes"]
            if scope["state"]["token"] is not None:
                scope["state"]["token"].end()
            self._log(scope, status, time.monotonic() - started)

    def _check(self, request: Request) -> None:
        """What holds for each route. Raises `Forbidden`."""
        check_host(request, self._gateway.settings.host_names)
        check_site(request)

    def _is_managing(self, scope: Scope) -> bool:
        """Where both ports are one, that one has all routes."""
        port: int = scope["server"][1]
        return port != self._gateway.settings.port

    @staticmethod
    def _log(scope: Scope, status: int, seconds: float) -> None:
        if scope["path"] in ("/ping", "/health", "/metrics"):
            return
        headers = dict(scope["headers"])
        alias = scope["state"]["alias"]
        target = headers.get(b"x-amzn-sagemaker-target-model", b"").decode("utf-8", "replace")
        fields = {
            "request_id": scope["state"]["request_id"],
            "model": scope["state"]["model"] if alias else target or scope["state"]["model"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
        }
        if alias:
            fields["alias"] = alias
        if scope["state"]["token_name"] is not None:
            fields["token"] = scope["state"]["token_name"]
        logger.info("request", extra={"fields": fields})

    async def _ping(self, request: Request) -> Response:
        self._gateway.check_health()
        return JSONResponse({"status": "Healthy"})

    async def _metrics(self, request: Request) -> Response:
        gateway = self._gateway
        statistics = None
        with contextlib.suppress(EngineError):
            statistics = await gateway.engine.statistics(timeout_s=2)
        names = gateway.registry.engine_names()
        waiting = {model.name: len(model.line.waiting) for model in gateway.registry.all()}
        # Of hundreds of models a fifth of a second's work.
        text = await asyncio.to_thread(
            gateway.metrics.text, statistics, names, waiting, gateway.tokens.all(), gateway.aliases
        )
        return Response(text, media_type=CONTENT_TYPE)

    async def _openapi(self, request: Request) -> Response:
        described = _description(self._is_managing(request.scope))
        return Response(described, media_type="application/json")

    async def _docs(self, request: Request) -> Response:
        return HTMLResponse(_page(self._is_managing(request.scope)))


@functools.cache
def _description(managing: bool) -> bytes:
    return bytes(JSONResponse(openapi.document(managing=managing)).body)


@functools.cache
def _page(managing: bool) -> str:
    return openapi.page(openapi.document(managing=managing))


def _request_id(scope: Scope) -> str:
    """The client's own, if it can be a header and a log line; otherwise a new one."""
    given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"").decode("latin-1")
    return given if GIVEN_ID.fullmatch(given) else str(uuid.uuid4())


def _refused(request: Request, error: ServiceError) -> Response:
    """An error in the shape of the path's contract."""
    path = request.scope["path"]
    if path.startswith("/v1/"):
        return respond(request, error)
    response = error_response(request, error)
    return as_error(response) if path.startswith("/v2/") else response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(request, ResourceNotFound("Requested resource is not found."))
    if error.status_code == 405:
        path = request.scope["path"]
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        first = next(route for route in routes if route.path_regex.match(path))
        same = [route.methods or () for route in routes if route.path == first.path]
        methods = {method for methods in same for method in methods}
        message = "Requested method is not allowed, please refer to API document."
        return error_response(request, MethodNotAllowed(message, methods))
    return error_response(request, ServingError(str(error.detail)))
