"""The application on both ports: an id, a route and a log line for each request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.worker_protocol import REQUEST_ID, SERVED_MODEL, TRACEPARENT
from serving.api.access import authorize
from serving.api.error_responses import error_response
from serving.api.gateway import Gateway
from serving.api.http_protocol import HEALTH_PATHS
from serving.api.request import Request, RequestState
from serving.api.routes import MANAGEMENT, REQUESTS, is_managing
from serving.api.routing import find_route
from serving.api.sites import check_host, check_site
from serving.console.routes import Console
from serving.errors import Unavailable

logger = logging.getLogger(__name__)

GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
# A `traceparent` of W3C: the ids of a trace and of a span, neither of them 0. Others are ignored.
PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# What a browser may do with an answer, a script's HTML too: show it without running it as this
# origin, which is the console's. The console and /docs have policies of their own.
PASSIVE = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"x-content-type-options", b"nosniff"),
)


class App:
    """The ASGI application of both ports, over one `Gateway`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._requests = (*Console(gateway).routes(), *REQUESTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        state = scope["state"] = RequestState(
            _given(headers, REQUEST_ID, GIVEN_ID) or str(uuid.uuid4()),
            _given(headers, TRACEPARENT, PARENT),
            started=time.monotonic(),
        )
        status = 0

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in PASSIVE if name not in given),
                    (REQUEST_ID.encode(), state.request_id.encode()),
                ]
                if state.model is not None and state.alias is not None:
                    served = quote(state.model, errors="replace")
                    message["headers"].append((SERVED_MODEL.encode(), served.encode()))
            await send(message)

        if scope["path"] not in HEALTH_PATHS:
            await self._gateway.take_over(self._gateway.settings.request_timeout_s)
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
            await response(scope, receive, send_with_id)
        except Exception as error:  # raised in a stream, whose connection is then closed
            error_response(request, error)
        except asyncio.CancelledError:  # of a stream that outlasts DRAIN_S, which is closed, too
            if not self._gateway.draining:
                raise
        finally:
            self._gateway.body_bytes -= state.body_bytes
            if state.token is not None:
                state.token.end()
            self._log(request, status)

    async def _answer(self, request: Request) -> Response:
        gateway = self._gateway
        try:
            check_host(request, gateway.settings.host_names)
            check_site(request)
            routes = MANAGEMENT if is_managing(gateway, request) else self._requests
            route = find_route(routes, request)
            if route.kind.right is not None:
                authorize(gateway, request, route.kind.right)
            return await route.endpoint(gateway, request)
        except Exception as error:
            return error_response(request, error)
        except asyncio.CancelledError:  # uvicorn's, of a request that outlasts DRAIN_S
            if not gateway.draining:
                raise
            return error_response(request, Unavailable("the server is stopping", retry_after_s=5))

    @staticmethod
    def _log(request: Request, status: int) -> None:
        scope, state = request.scope, request.state
        if scope["path"] in ("/ping", "/health", "/metrics"):
            return
        headers = dict(scope["headers"])
        target = headers.get(b"x-amzn-sagemaker-target-model", b"").decode("utf-8", "replace")
        fields = {
            "request_id": state.request_id,
            "model": state.model if state.alias else target or state.model,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(time.monotonic() - state.started, 6),
        }
        if state.traceparent is not None:
            fields["trace_id"] = state.traceparent.split("-")[1]
        if state.batch is not None:
            fields |= asdict(state.batch)
        if state.alias is not None:
            fields["alias"] = state.alias
        if state.token_name is not None:
            fields["token"] = state.token_name
        logger.info("request", extra={"fields": fields})


def _given(headers: Mapping[bytes, bytes], name: str, form: re.Pattern[str]) -> str | None:
    """Return a header if it matches `form`, else None: it is neither logged nor forwarded."""
    given = headers.get(name.encode(), b"").decode("latin-1")
    return given if form.fullmatch(given) else None
