"""What all contracts share: the gateway's state, reading requests, writing errors."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.async_client import AsyncEngineClient
from engine.errors import EngineError, InvalidRequest
from engine.json_body import read_json
from serving.api.metrics import Metrics
from serving.errors import (
    BadRequest,
    BodyTooLarge,
    ServingError,
    Unauthorized,
)
from serving.mms_client import MMSClient
from serving.model import Model
from serving.models import Registry
from serving.names import normal_name
from serving.on_demand import OnDemand
from serving.recovery import Recovery
from serving.settings import Settings
from serving.store import Lookups

logger = logging.getLogger(__name__)

TARGET_MODEL = "x-amzn-sagemaker-target-model"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"


class ModelName(Convertor[str]):
    """`{name:model}` in a route: a model's name, which may have slashes, in its normal form."""

    regex = ".*"

    def convert(self, value: str) -> str:
        return normal_name(value)

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("model", ModelName())


@dataclass
class Gateway:
    """Everything the routes need."""

    settings: Settings
    registry: Registry
    on_demand: OnDemand
    recovery: Recovery
    mms: MMSClient
    engine: AsyncEngineClient
    lookups: Lookups
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
        if self.settings.sagemaker_multi_model:
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
        value = read_json(body)
    except InvalidRequest as error:
        raise BadRequest(error.message) from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def header_text(value: str) -> str:
    """A header that may hold a name, as UTF-8; HTTP itself knows Latin-1 only."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


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
