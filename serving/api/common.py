"""What all contracts share: the gateway's state, reading requests, writing errors."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.async_client import AsyncEngineClient
from engine.errors import EngineError
from serving.api.metrics import Metrics
from serving.errors import (
    BadRequest,
    BodyTooLarge,
    ModelNotFound,
    ServingError,
    Unauthorized,
    Unavailable,
    WorkerFailed,
)
from serving.mms_client import Answer, MMSClient, message_of
from serving.models import MMS_GRACE_S, Registry
from serving.settings import Settings
from serving.store import Store, StoredModel, StoreSettings

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

TARGET_MODEL = "x-amzn-sagemaker-target-model"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
# Of a client's headers only these reach a worker: an odd one can stop it (fault 3 of MMS).
FORWARDED = ("content-type", "accept", TARGET_MODEL, CUSTOM_ATTRIBUTES)
# Of a worker's headers only these reach the client.
RETURNED = ("retry-after", CUSTOM_ATTRIBUTES)


@dataclass
class Gateway:
    """Everything the routes need."""

    settings: Settings
    registry: Registry
    mms: MMSClient
    engine: AsyncEngineClient
    store: Store | None
    store_settings: StoreSettings
    metrics: Metrics
    single_model: str | None = None
    healthy: bool = False
    started: bool = False  # what is to be there from the start is loaded
    draining: bool = False
    requests: int = 0  # being answered
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def on_demand(self) -> bool:
        """Whether a call may load its model: not where SageMaker decides what is loaded."""
        return self.store is not None and not self.settings.sagemaker_multi_model

    def find(self, name: str) -> StoredModel:
        if self.store is None:
            raise ModelNotFound(f"Model not found: {name}")
        return self.store.find(name)

    async def ensure(self, name: str) -> None:
        """Loads `name` on demand where that is allowed. Raises `ModelNotFound`."""
        if self.on_demand:
            await self.registry.ensure(name, self.find)


async def read_body(request: Request, limit: int) -> bytes:
    """Raises `BodyTooLarge` as soon as it is."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {announced} bytes, at most {limit} are taken")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes")
    return bytes(body)


async def read_json_object(request: Request, limit: int) -> dict[str, Any]:
    """A JSON body, `{}` where there is none. Raises `BadRequest`."""
    body = await read_body(request, limit)
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


async def invoke(gateway: Gateway, request: Request, name: str) -> Response:
    """Has a model answer a request, loading it first where that is allowed."""
    if gateway.draining:
        raise Unavailable("the server is stopping", retry_after_s=5)
    started = time.monotonic()
    body = await read_body(request, gateway.settings.max_request_bytes)
    headers = forwarded_headers(request)
    status = 500
    gateway.requests += 1
    request.state.model = name
    try:
        for _ in range(3):  # it may be evicted between its load and its use
            await gateway.ensure(name)
            try:
                async with gateway.registry.use(name) as model:
                    answer = await _ask(gateway, model, body, headers)
                break
            except ModelNotFound:
                if not gateway.on_demand:
                    raise
        else:
            raise Unavailable(
                f"Model {name} is loaded and evicted again and again", retry_after_s=2
            )
        status = answer.status
        return _response(answer)
    except (ServingError, EngineError) as error:
        status = error.status
        raise
    finally:
        gateway.requests -= 1
        gateway.metrics.request(name, status, time.monotonic() - started)


async def _ask(gateway: Gateway, model: Any, body: bytes, headers: dict[str, str]) -> Answer:
    timeout_s = gateway.settings.request_timeout_s + MMS_GRACE_S
    for attempt in range(2):
        try:
            answer = await gateway.mms.invoke(model.id, body, headers, timeout_s)
        except Unavailable:
            if attempt:
                raise
            answer = None
        # MMS has been started again and does not know the model yet, or its worker died before
        # it could say anything: once more, when it is back.
        if answer is not None and not (attempt == 0 and _is_lost(answer)):
            return answer
        await gateway.registry.wait_until_restored(model, timeout_s)
    raise Unavailable(f"Model {model.name} is being loaded again", retry_after_s=1)


def _is_lost(answer: Answer) -> bool:
    if answer.status == 404:
        return b"ModelNotFoundException" in answer.body
    return answer.status in (500, 503) and answer.body.lstrip().startswith(b'{\n  "code"')


def _response(answer: Answer) -> Response:
    if answer.status in (500, 503) and answer.body.lstrip().startswith(b'{\n  "code"'):
        # MMS's own words, not a worker's.
        if answer.status == 503:
            raise Unavailable("the model has too many requests", retry_after_s=1)
        raise WorkerFailed(f"the model's worker failed ({message_of(answer)})")
    headers = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
    kind = answer.headers.get("content-type", "application/octet-stream")
    return Response(answer.body, answer.status, {**headers, "content-type": kind})


def forwarded_headers(request: Request) -> dict[str, str]:
    """The headers for a worker. Raises `BadRequest` for one that is not ASCII."""
    found = {"x-request-id": request.state.request_id}
    for name in FORWARDED:
        value = request.headers.get(name)
        if value is None:
            continue
        if not value.isascii() or not value.isprintable():
            raise BadRequest(f"the header {name} must be printable ASCII")
        found[name] = value
    found.setdefault("content-type", "application/json")
    return found


def check_token(request: Request, token: str) -> None:
    """Raises `Unauthorized` unless the request carries `Authorization: Bearer <token>`."""
    if not token:
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not secrets.compare_digest(given.encode(), token.encode()):
        raise Unauthorized("send the token as Authorization: Bearer <token>")


def error_response(request: Request, error: Exception) -> Response:
    """An error in MMS's shape. What is not meant for people goes to the log only."""
    if not isinstance(error, ServingError | EngineError):
        logger.error("a request failed", exc_info=error)
        error = ServingError("an error inside the server; the log has it under the request id")
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{max(error.retry_after_s, 1):.0f}"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.to_body(), error.status, headers)
