"""What all contracts share: the gateway's state, reading requests, writing errors."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.async_client import AsyncEngineClient
from engine.errors import EngineError
from serving.api.metrics import Metrics
from serving.errors import (
    BadRequest,
    BodyTooLarge,
    ServingError,
    Unauthorized,
    Unavailable,
    WorkerFailed,
)
from serving.mms_client import TIMEOUT_HEADER, Answer, MMSClient, message_of
from serving.model import Model
from serving.models import Registry
from serving.on_demand import OnDemand
from serving.recovery import Recovery
from serving.settings import Settings
from serving.store import Store, StoreSettings
from serving.workers import MMS_GRACE_S

logger = logging.getLogger(__name__)

TARGET_MODEL = "x-amzn-sagemaker-target-model"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
MAX_HEADER_CHARACTERS = 6000  # together; MMS takes 8192
# Of a client's headers only these reach a worker: an odd one can stop it (fault 3 of MMS).
FORWARDED = ("content-type", "accept", TARGET_MODEL, CUSTOM_ATTRIBUTES)
# Of a worker's headers only these reach the client.
RETURNED = ("retry-after", CUSTOM_ATTRIBUTES)


@dataclass
class Gateway:
    """Everything the routes need."""

    settings: Settings
    registry: Registry
    on_demand: OnDemand
    recovery: Recovery
    mms: MMSClient
    engine: AsyncEngineClient
    store: Store | None
    store_settings: StoreSettings
    metrics: Metrics
    single_model: str | None = None
    healthy: bool = False
    adopted: bool = False  # knows what the gateway before it had loaded
    started: bool = False  # what is to be there from the start is loaded
    start_error: str | None = None  # why the one model of a single-model server is not there
    draining: bool = False
    requests: int = 0  # being answered
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def use(self, name: str) -> AbstractAsyncContextManager[Model]:
        """A model for one request, loaded first if need be: not where SageMaker decides that."""
        if self.store is None or self.settings.sagemaker_multi_model:
            return self.registry.use(name)
        return self.on_demand.use(name)


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
    if not gateway.adopted:
        raise Unavailable("the server is starting", retry_after_s=1)
    started = time.monotonic()
    status, label = 500, ""  # a name that is no model is no label
    gateway.requests += 1
    request.state.model = name
    try:
        headers = forwarded_headers(request)
        body = await read_body(request, gateway.settings.max_request_bytes)
        async with gateway.use(name) as model:
            label = name
            answer = await _ask(gateway, model, body, headers)
        status = answer.status
        return _response(answer)
    except (ServingError, EngineError) as error:
        status = error.status
        raise
    except ClientDisconnect:
        status = 499
        raise
    finally:
        gateway.requests -= 1
        gateway.metrics.request(label, status, time.monotonic() - started)


async def _ask(gateway: Gateway, model: Model, body: bytes, headers: dict[str, str]) -> Answer:
    """The worker's answer. A worker that is lost meanwhile is asked once more when it is back."""
    limit_s = model.request_timeout_s
    headers = {**headers, TIMEOUT_HEADER: f"{limit_s:g}"}
    timeout_s = limit_s + MMS_GRACE_S
    end = time.monotonic() + timeout_s
    try:
        answer = await _ask_once(gateway, model, body, headers, timeout_s)
    except Unavailable:  # MMS is being started again
        answer = None
    if answer is None or (not answer.by_worker and answer.status in (404, 500, 503)):
        await gateway.recovery.wait_for(model, end - time.monotonic())
        left_s = max(end - time.monotonic(), 1.0)
        answer = await _ask_once(gateway, model, body, headers, left_s)
    if answer is None or not answer.by_worker:
        raise _error_of_mms(model, answer)
    return answer


async def _ask_once(
    gateway: Gateway, model: Model, body: bytes, headers: dict[str, str], timeout_s: float
) -> Answer | None:
    """None if the worker is given up meanwhile: MMS would not answer then."""
    call = asyncio.create_task(gateway.mms.invoke(model.id, body, headers, timeout_s))
    lost = asyncio.create_task(model.lost.wait())
    try:
        await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
        return await call if call.done() else None
    finally:
        call.cancel()
        lost.cancel()


def _error_of_mms(model: Model, answer: Answer | None) -> ServingError:
    """What MMS itself says in the place of a worker, as an error of ours."""
    if answer is None or answer.status == 404:
        return Unavailable(f"Model {model.name} is being loaded again", retry_after_s=1)
    if answer.status == 503:
        return Unavailable(f"Model {model.name} has too many requests", retry_after_s=1)
    return WorkerFailed(f"the worker of model {model.name} failed ({message_of(answer)})")


def _response(answer: Answer) -> Response:
    headers = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
    kind = answer.headers.get("content-type", "application/octet-stream")
    return Response(answer.body, answer.status, {**headers, "content-type": kind})


def header_text(value: str) -> str:
    """A header that may hold a name, as UTF-8; HTTP itself knows Latin-1 only."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def forwarded_headers(request: Request) -> dict[str, str]:
    """The headers for a worker. Raises `BadRequest` for one that it could not take."""
    found = {"x-request-id": request.state.request_id}
    for name in FORWARDED:
        value = request.headers.get(name)
        if value is None:
            continue
        if name == TARGET_MODEL and not value.isascii():
            value = quote(header_text(value))
        if not value.isascii() or not value.isprintable():
            raise BadRequest(f"the header {name} must be printable ASCII")
        found[name] = value
    size = sum(map(len, found.values()))
    if size > MAX_HEADER_CHARACTERS:
        raise BadRequest(
            f"the headers {', '.join(FORWARDED)} have {size} characters together, at most"
            f" {MAX_HEADER_CHARACTERS} are taken"
        )
    found.setdefault("content-type", "application/json")
    return found


def check_token(request: Request, token: str) -> None:
    """Raises `Unauthorized` unless the request carries `Authorization: Bearer <token>`."""
    if not token:
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not secrets.compare_digest(given.encode("latin-1"), token.encode()):
        raise Unauthorized("send the token as Authorization: Bearer <token>")


def error_response(request: Request, error: Exception) -> Response:
    """An error in MMS's shape. What is not meant for people goes to the log only."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if not isinstance(error, ServingError | EngineError):
        logger.error("a request failed", exc_info=error)
        error = ServingError("an error inside the server; the log has it under the request id")
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{max(error.retry_after_s, 1):.0f}"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    text = json.dumps(error.to_body(), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(text, error.status, headers, media_type="application/json")
