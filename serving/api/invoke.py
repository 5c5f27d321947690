"""Has a model answer a request: through Multi Model Server, by the model's worker."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote

from anyio import CancelScope
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.errors import EngineError, EngineUnavailable, ServiceError
from common.json_body import check_count
from common.media_types import TEXT
from common.worker_protocol import (
    REQUEST_HEADER,
    REQUEST_ID,
    SERVED_MODEL,
    TIMEOUT_HEADER,
    TOKENS_HEADER,
    WORKER_HEADER,
)
from serving.api.answering import EngineRequest, Renderer, answer
from serving.api.error_responses import Shape, error_response
from serving.api.forms import check_form
from serving.api.gateway import Gateway
from serving.api.naming import choose_model, described_models, name_model
from serving.api.reading import header_text, off_loop, read_body
from serving.errors import (
    BadRequest,
    MMSEnded,
    ModelNotFound,
    NotOfTheEngine,
    ServingError,
    Timeout,
    Unavailable,
    WorkerFailed,
)
from serving.mms.client import Answer, Query, message_of
from serving.mms.workers import MMS_GRACE_S
from serving.models.model import Model, eviction_timeout
from serving.names import normal_name
from serving.tokens import current

MAX_HEADER_CHARACTERS = 6000  # together; MMS takes 8192
MAX_QUERY_CHARACTERS = 3000  # MMS takes a first line of 4096
TARGET_MODEL = "x-amzn-sagemaker-target-model"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
# Of a client's headers only these reach a worker: an odd one can stop it (fault 3 of MMS).
FORWARDED = ("content-type", "accept", TARGET_MODEL, CUSTOM_ATTRIBUTES)
# A worker dies in two steps, its process and the one that watches it, so twice is not enough.
ATTEMPTS = 3
# Of Multi Model Server, with the workers of all models, under one request.
ENDS = 2
RETRY_S = 0.1
NO_MODEL = (
    "say which model: X-Amzn-SageMaker-Target-Model, ?model_name=, CustomAttributes model=NAME,"
    " model in a body of OpenAI's, parameters.adapter_id in one of TGI's, or /predictions/{name}"
)
AWS_ACCEPT = "x-amzn-sagemaker-accept"
# What a worker's answer may not set: this connection's own headers, what holds for the whole origin
# and so for other models, and what Multi Model Server puts on each answer.
WITHHELD = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade", "content-length", "date", "server",
    "alt-svc", "clear-site-data", "set-cookie", "set-cookie2", "strict-transport-security",
    "cache-control", "expires", "pragma", REQUEST_ID, WORKER_HEADER, TOKENS_HEADER, SERVED_MODEL,
}  # fmt: skip


Limit = Callable[[bytes], Awaitable[float]]  # of a body: how many seconds its answer may take


# Answers a body, with the worker's headers, that is for no model; else None.
Intercept = Callable[[Gateway, Request, bytes, Mapping[str, str]], Awaitable[Response | None]]


@dataclass(frozen=True)
class Direct:
    """A request that the engine answers without the model's worker.

    parse: parses it for the model of this name
    shape: of its errors; None for the route's
    model, user: those that the body names, or ""
    """

    parse: Callable[[str], tuple[EngineRequest, Renderer]]
    shape: Shape | None = None
    model: str = ""
    user: str = ""


Read = Callable[[Request, bytes, Mapping[str, str]], Direct | None]


async def invoke(
    gateway: Gateway,
    request: Request,
    name: str | None,
    headers: Mapping[str, str] | None = None,
    limit: Limit | None = None,
    read: Read | None = None,
    intercept: Intercept | None = None,
) -> Response:
    """Has a model answer a request, loading it first where that is allowed.

    `name` is None where only the body may name the model. `headers` are for the worker, in place
    of the client's; `read` returns how the engine
    answers a body directly, if it does; `intercept` answers a body that is for no model. The
    deadline is the model's, counted from the request's head, or the client's own `limit` where that
    is shorter.
    """
    gateway.check_ready()
    if name is not None:
        name_model(gateway, request, name)
    async with AsyncExitStack() as resources:
        counted = request.state.counted = resources.enter_context(Counted(gateway))
        headers = {**forwarded_headers(request), **(headers or {})}
        query = _query(request)
        body = await read_body(gateway, request)
        kind = headers.get("content-type", "")
        await off_loop(len(body), check_form, kind, body)
        if intercept and (answered := await intercept(gateway, request, body, headers)) is not None:
            return answered
        limit_s = await limit(body) if limit else math.inf
        direct = await off_loop(len(body), read, request, body, headers) if read else None
        if name is None:
            if direct is None or not direct.model:
                raise BadRequest(NO_MODEL)
            name = normal_name(direct.model).lstrip("/")
            name_model(gateway, request, name)
        name = choose_model(gateway, request, name, direct.user if direct is not None else "")
        used = await resources.enter_async_context(AsyncExitStack())
        async with until(gateway, request, name, limit_s) as scope:
            model = await used.enter_async_context(gateway.use(name))
            counted.model = name
            check_version(request, model)
            end = request.state.started + min(model.request_timeout_s, limit_s)
            scope.deadline = end
            # Elsewhere what a body holds is the model's own matter.
            if direct is not None and model.in_engine:
                response = await _answer_directly(gateway, request, direct, model, end, resources)
                counted.status = response.status_code
                return response
            if model.in_engine and kind.partition(";")[0].strip().lower() != TEXT:
                await off_loop(len(body), check_count, body)
            await used.enter_async_context(gateway.admission.place(model.line, end))
            headers[REQUEST_HEADER] = secrets.token_hex(8)
            call = _ask(gateway, model, body, headers, query, end)
            reply = await _answer(gateway, call, headers[REQUEST_HEADER], used.pop_all())
            if time.monotonic() >= end:  # it came while the loop was busy with others
                raise Timeout(f"no answer within {end - request.state.started:g} s")
        counted.status = reply.status
        if model.in_engine:
            _count_tokens(reply)
        return _response(reply)


async def _answer_directly(
    gateway: Gateway,
    request: Request,
    direct: Direct,
    model: Model,
    end: float,
    resources: AsyncExitStack,
) -> Response:
    try:
        parsed, renderer = direct.parse(model.name)
        if parsed.adapter and parsed.adapter not in (model.name, request.state.alias):
            name_model(gateway, request, parsed.adapter)
            name = choose_model(gateway, request, parsed.adapter)
            model = await resources.enter_async_context(gateway.use(name))
            request.state.counted.model = model.name
            check_engine(model)
            end = min(end, request.state.started + model.request_timeout_s)
        return await answer(gateway, model, parsed, renderer, end, resources)
    except Exception as error:
        if direct.shape is None:
            raise
        return error_response(request, error, direct.shape)


async def describe(gateway: Gateway, request: Request, name: str) -> Model:
    """Loads a model as `invoke` does and returns it with its metadata (`GET /v2/models/{name}`).

    Of an alias it is the model with the largest weight.
    """
    gateway.check_ready()
    name_model(gateway, request, name)
    name, *_ = described_models(gateway, name)
    with Counted(gateway) as counted:
        async with until(gateway, request, name), gateway.use(name) as model:
            counted.model = name
            check_version(request, model)
            return model


async def answer_by_engine(
    gateway: Gateway,
    request: Request,
    name: str,
    work: Callable[[Model, float, AsyncExitStack], Awaitable[Response]],
    limit_s: float = math.inf,
    user: str = "",
) -> Response:
    """Has `work` answer with a model of the engine, which is loaded as `invoke` does.

    `work` gets the deadline, and what is in use until the answer's end. Raises `NotOfTheEngine` for
    a model that answers by its own code.
    """
    gateway.check_ready()
    name_model(gateway, request, name)
    name = choose_model(gateway, request, name, user)
    async with AsyncExitStack() as resources:
        counted = resources.enter_context(Counted(gateway))
        async with until(gateway, request, name, limit_s) as scope:
            model = await resources.enter_async_context(gateway.use(name))
            counted.model = name
            check_version(request, model)
            check_engine(model)
            scope.deadline = request.state.started + min(model.request_timeout_s, limit_s)
            return await work(model, scope.deadline, resources)
    raise AssertionError("it was returned or raised")


def check_version(request: Request, model: Model) -> None:
    """Raises `ModelNotFound` for another version than the one that is loaded."""
    version = request.path_params.get("version", model.version)
    if version != model.version:
        raise ModelNotFound(f"Model {model.name} has version {model.version}, not {version[:50]}")


def check_engine(model: Model) -> None:
    """Raises `NotOfTheEngine` for a model that answers by its own code."""
    if not model.in_engine:
        raise NotOfTheEngine(
            f"{model.name} answers by its own code: call /predictions/{model.name}"
        )


@contextlib.asynccontextmanager
async def until(
    gateway: Gateway, request: Request, name: str, limit_s: float = math.inf
) -> AsyncIterator[CancelScope]:
    """Ends what is inside at its deadline, or when the client disconnects.

    Raises `Timeout`, or `Unavailable` where the model still waited for memory or disk.
    """
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        scope.cancel()

    limit_s = min(gateway.settings.request_timeout_s, limit_s)
    with CancelScope(deadline=request.state.started + limit_s) as scope:
        watching = asyncio.create_task(watch())
        late = False
        try:
            yield scope
        except (Unavailable, EngineUnavailable):  # it waited for a process that restarts
            late = time.monotonic() >= scope.deadline
            if not late:
                raise
        finally:
            watching.cancel()
    if gone and scope.cancelled_caught:
        raise ClientDisconnect
    if late or scope.cancelled_caught:
        limit_s = scope.deadline - request.state.started
        model = gateway.registry.find(name)
        if model is not None and model.shortage is not None:
            raise eviction_timeout(model.shortage, limit_s)
        raise Timeout(f"no answer within {limit_s:g} s")


async def _answer(
    gateway: Gateway, call: Coroutine[Any, Any, Answer], id: str, used: AsyncExitStack
) -> Answer:
    """Returns the answer of a worker.

    Where the client is gone the engine is cancelled, which Multi Model Server cannot be: the model
    and its place in the queue stay in use until the worker has answered.
    """

    async def ask() -> Answer:
        async with used:
            return await call

    task = gateway.registry.spawn(ask())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        gateway.registry.spawn(_call_off(gateway, id))
        raise


async def _call_off(gateway: Gateway, id: str) -> None:
    with contextlib.suppress(EngineError):
        await gateway.engine.cancel(id)


class Counted:
    """A request that is being answered, until it is."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = time.monotonic()
        self.model = ""  # a name that is no model is no label
        self.status = 200

    def __enter__(self) -> Counted:
        self._gateway.requests += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, ServiceError):
            self.status = error.status
        elif isinstance(error, ClientDisconnect | asyncio.CancelledError):
            self.status = 499
        elif error is not None:
            self.status = 500
        self._gateway.requests -= 1
        seconds = time.monotonic() - self._started
        self._gateway.metrics.request(self.model, self.status, seconds)


def _query(request: Request) -> Query:
    """For services of Multi Model Server. Raises `BadRequest` for one that it could not take."""
    size = len(request.scope["query_string"])
    if not size:
        return ()
    if size > MAX_QUERY_CHARACTERS:
        raise BadRequest(
            f"the query has {size} characters, at most {MAX_QUERY_CHARACTERS} are taken: send it"
            " as the body"
        )
    return request.query_params.multi_items()


async def _ask(
    gateway: Gateway,
    model: Model,
    body: bytes,
    headers: Mapping[str, str],
    query: Query,
    end: float,
) -> Answer:
    """Returns the worker's answer, and sends the request again where the worker was lost.

    A request after which its process ends each time fails; sooner where other models need that
    process, too.
    """
    answer: Answer | None = None
    ends = 0
    for attempt in range(ATTEMPTS):
        if answer is not None and answer.status == 503:  # of MMS, which has no worker now
            await asyncio.sleep(RETRY_S * 2**attempt)
        if attempt:
            await gateway.recovery.wait_for(model, end - time.monotonic())
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        try:
            timed = {**headers, TIMEOUT_HEADER: f"{left_s:.3f}"}
            answer = await _ask_once(gateway, model, body, timed, query, left_s + MMS_GRACE_S)
        except Unavailable as error:  # MMS is being started again
            ends += isinstance(error, MMSEnded)
            if ends == ENDS:
                raise WorkerFailed(f"Multi Model Server ended {ENDS} times under this") from None
            if attempt == ATTEMPTS - 1:
                raise
            continue
        if answer is not None and answer.status == 507 and await _lost_its_memory(gateway, model):
            answer = None
        elif answer is not None and (answer.by_worker or answer.status not in (404, 500, 503)):
            break
    if answer is None or not answer.by_worker:
        raise _error_of_mms(model, answer)
    return answer


async def _lost_its_memory(gateway: Gateway, model: Model) -> bool:
    """Whether a restarted engine has no memory left for the model, which other models took.

    The model is then unloaded or comes back, unlike a request that can never fit.
    """
    if not model.in_engine:
        return False
    try:
        return all(held["name"] != model.engine_name for held in await gateway.engine.models())
    except EngineError:
        return True


async def _ask_once(
    gateway: Gateway,
    model: Model,
    body: bytes,
    headers: Mapping[str, str],
    query: Query,
    timeout_s: float,
) -> Answer | None:
    """None if the worker is given up meanwhile: MMS would not answer then."""
    with CancelScope() as scope:
        model.pending.add(scope)
        try:
            return await gateway.mms.invoke(model.id, body, headers, timeout_s, query)
        finally:
            model.pending.remove(scope)
    return None


def _error_of_mms(model: Model, answer: Answer | None) -> ServingError:
    """What MMS itself says in the place of a worker, as an error of ours."""
    if answer is None or answer.status == 404:
        return Unavailable(f"Model {model.name} is being loaded again")
    if answer.status == 503:
        return Unavailable(f"Model {model.name} has no worker now")
    return WorkerFailed(f"the worker of model {model.name} failed ({message_of(answer)})")


def _count_tokens(answer: Answer) -> None:
    """For the token of TOKENS_FILE that the request has."""
    token, counts = current.get(), answer.headers.get(TOKENS_HEADER)
    if token is not None and counts is not None:
        prompt, made = counts.split()
        token.usage.count(int(prompt), int(made))


def _response(answer: Answer) -> Response:
    headers = {"content-type": "application/octet-stream"}
    for name, value in answer.headers.items():
        if name.lower() not in WITHHELD and value.isascii() and value.isprintable():
            headers[name.lower()] = value
    return Response(answer.body, answer.status, headers)


def forwarded_headers(request: Request) -> dict[str, str]:
    """The headers for a worker. Raises `BadRequest` for one that it could not take."""
    forwarded = {REQUEST_ID: request.state.request_id}
    given = dict(reversed(request.headers.items()))  # the first of each name
    if AWS_ACCEPT in given:  # the AWS client's call for a stream has another name for it
        given["accept"] = given[AWS_ACCEPT]
    for name in FORWARDED:
        value = given.get(name)
        if value is None:
            continue
        if name == TARGET_MODEL and not value.isascii():
            value = quote(header_text(value))
        if not value.isascii() or not value.isprintable():
            raise BadRequest(f"the header {name} must be printable ASCII")
        forwarded[name] = value
    size = sum(map(len, forwarded.values()))
    if size > MAX_HEADER_CHARACTERS:
        raise BadRequest(
            f"the headers {', '.join(FORWARDED)} have {size} characters together, at most"
            f" {MAX_HEADER_CHARACTERS} are taken"
        )
    return forwarded
