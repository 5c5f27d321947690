"""What all contracts share: the gateway's state, reading requests, writing errors."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import math
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anyio import CancelScope, move_on_after
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.errors import InvalidRequest, ServiceError
from common.json_body import MAX_VALUES, read_json
from engine.http.async_client import AsyncEngineClient
from serving.aliases import Aliases
from serving.api.encoding import Decoder
from serving.api.metrics import Metrics
from serving.api.sessions import Sessions
from serving.console.journal import Journal
from serving.errors import (
    BadRequest,
    BodyTooLarge,
    MethodNotAllowed,
    ModelNotFound,
    RequestTimeout,
    ServingError,
    StillLoading,
    Unauthorized,
    Unavailable,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from serving.mms.client import MMSClient
from serving.models.admission import Admission
from serving.models.model import Model
from serving.models.on_demand import OnDemand
from serving.models.recovery import Recovery
from serving.models.registry import Registry
from serving.names import normal_name
from serving.settings import Settings
from serving.store import Lookups
from serving.tokens import Tokens, current

logger = logging.getLogger(__name__)

# All bodies together may take as much memory as so many of the largest.
LARGEST_BODIES = 32
LARGE_BYTES = 64 << 10  # takes a millisecond to read, which is not done on the event loop
T = TypeVar("T")
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
    journal: Journal
    admission: Admission = field(default_factory=Admission)
    single_model: str | None = None
    sessions: Sessions | None = None  # where they are enabled
    tokens: Tokens = field(default_factory=lambda: Tokens(""))
    aliases: Aliases = field(default_factory=Aliases)
    healthy: bool = False
    adopted: bool = False  # knows what the gateway before it had loaded
    started: bool = False  # what is to be there from the start is loaded
    start_error: str | None = None  # why the one model of a single-model server is not there
    draining: bool = False
    takes_over: bool = False  # from a gateway that has ended, and whose clients wait for this one
    started_or_stopping: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0  # being answered
    body_bytes: int = 0  # of their bodies
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def take_over(self, timeout_s: float) -> None:
        """Waits, if a gateway ran before this one, until this one has its models."""
        if self.takes_over and not self.started:
            with move_on_after(timeout_s):
                await self.started_or_stopping.wait()

    def check_ready(self) -> None:
        """Raises `Unavailable` while requests are not taken: the same for every route."""
        if self.draining:
            raise Unavailable("the server is stopping", retry_after_s=5)
        if self.start_error is not None:
            raise Unavailable(f"the model did not load: {self.start_error}")
        if not self.adopted:
            raise Unavailable("the server is starting")
        if not self.started:
            raise StillLoading("models are being loaded")

    def check_health(self) -> None:
        """Raises `Unavailable` where a new request would not be answered now.

        A request in flight waits for the process that is restarted.
        """
        self.check_ready()
        if not self.healthy:
            raise Unavailable("a part of the server is being started again")

    async def find(self, name: str) -> Model | None:
        """None for one that the store has and a request would load. Raises `ModelNotFound`."""
        model = self.registry.find(name)
        if model is None:
            if self.settings.sagemaker_multi_model:
                raise ModelNotFound(f"Model not found: {name}")
            await self.lookups.find(name)
        return model

    def use(self, name: str) -> AbstractAsyncContextManager[Model]:
        """A model for one request, loaded first if need be: not where SageMaker decides that."""
        if self.settings.sagemaker_multi_model:
            return self.registry.use(name)
        return self.on_demand.use(name)


async def read_body(gateway: Gateway, request: Request) -> bytes:
    """Returns the body, decompressed.

    Raises `BodyTooLarge` as soon as the limit is exceeded, `RequestTimeout` where it is late,
    `Unavailable` where too many bodies are in memory, `UnsupportedEncoding` and `BadRequest`.
    """
    settings = gateway.settings
    limit = settings.max_request_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {announced} bytes, at most {limit} are taken")
    decoder = Decoder(request.headers.get("content-encoding", ""), limit)
    with CancelScope(deadline=request.state.started + settings.request_timeout_s) as scope:
        async for piece in request.stream():
            more = decoder.feed(piece)
            gateway.body_bytes += more
            request.state.body_bytes += more
            if gateway.body_bytes > LARGEST_BODIES * limit:
                raise Unavailable("too many large bodies are being worked on")
    if scope.cancelled_caught:
        raise RequestTimeout(f"the body has {settings.request_timeout_s} s to arrive")
    return decoder.finish()


async def off_loop(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """What `work` makes of `size` bytes, on a thread where that takes milliseconds."""
    if size <= LARGE_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


async def read_json_object(
    gateway: Gateway, request: Request, *, of_any_type: bool = False
) -> dict[str, Any]:
    """A JSON body, `{}` where there is none. Raises `BadRequest` and what `read_body` does."""
    body = await read_body(gateway, request)
    if not body.strip():
        return {}
    kind = request.headers.get("content-type", "")
    if not of_any_type and kind.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType(
            f"Content-Type is {kind[:100] or 'missing'}, must be application/json"
            " (with curl: -H 'Content-Type: application/json')"
        )
    try:
        value = await off_loop(len(body), read_json, body, MAX_VALUES)
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


class Right(enum.Enum):
    """What a token is for."""

    CALL = enum.auto()
    LIST = enum.auto()
    LOAD = enum.auto()  # and unload


def check_token(gateway: Gateway, request: Request, right: Right) -> None:
    """To be called once a request, before anything else.

    Raises `Unauthorized` unless it carries `Authorization: Bearer <token>` with a token for this,
    if any is set. For one of TOKENS_FILE it counts as in flight until `App` has sent its answer;
    raises `TooManyRequests` beyond the token's limits, `Forbidden` if it may not load. Which models
    such a token may use is for `serving.api.naming` to say.
    """
    settings = gateway.settings
    known = {
        Right.CALL: (settings.inference_token,),
        Right.LIST: (settings.management_token, settings.inference_token),
        Right.LOAD: (settings.management_token,),
    }[right]
    known = tuple(filter(None, known))
    if not known and not gateway.tokens.exist:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1")
    current.set(None)
    if scheme.lower() == "bearer":
        if any(secrets.compare_digest(sent, token.encode()) for token in known):
            return
        token = gateway.tokens.find(sent)
        if token is not None:
            request.state.token_name = token.name
            token.begin(gateway.tokens.now())
            request.state.token = token
            current.set(token)
            if right is Right.LOAD:
                token.check_load()
            return
    raise Unauthorized("send the token as Authorization: Bearer <token>")


def error_response(request: Request, error: Exception) -> Response:
    """An error in MMS's shape. What is not meant for people goes to the log only."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # for the log: the client is gone
    if not isinstance(error, ServiceError):
        fields = {"request_id": request.state.request_id}
        logger.error("a request failed", exc_info=error, extra={"fields": fields})
        error = ServingError("an error inside the server; the log has it under the request id")
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{math.ceil(max(error.retry_after_s, 1))}"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    if isinstance(error, UnsupportedEncoding):
        headers["Accept-Encoding"] = "gzip, deflate"
    text = json.dumps(error.to_body(), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(text, error.status, headers, media_type="application/json")
