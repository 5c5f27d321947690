"""Answers a request with a model: by the model's worker, or by the engine directly."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from anyio import CancelScope
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.errors import EngineUnavailable
from common.json_body import check_count
from common.media_types import TEXT
from serving.api.answering import EngineRequest, Renderer, answer
from serving.api.forms import check_form
from serving.api.gateway import Gateway
from serving.api.naming import choose_model, described_models, name_model
from serving.api.request import Counted, Request, Shape
from serving.api.request_body import off_loop, read_body
from serving.api.worker_calls import WorkerCall, forwarded_headers, read_query
from serving.errors import BadRequest, ModelNotFound, NotOfTheEngine, Unavailable, no_answer
from serving.models.model import Model, eviction_timeout
from serving.names import normal_name

NO_MODEL = (
    "say which model: X-Amzn-SageMaker-Target-Model, ?model_name=, CustomAttributes model=NAME,"
    " model in a body of OpenAI's, parameters.adapter_id in one of TGI's, or /predictions/{name}"
)

# Checks a request's body, given the headers for a worker; raises `ServiceError`.
Check = Callable[[Request, bytes, Mapping[str, str]], Awaitable[None]]


@dataclass(frozen=True)
class Direct:
    """How a body is answered, if not by the model's worker.

    parse: parses the body, given the model's name; None if the model's worker answers
    shape: the format of errors, which a model with its own code does not have; None for the
        route's
    model, user: the model and the user that the body names, or ""
    limit_s: the time limit that the body sets, from the request's head to the answer
    streams: whether `parse` only streams what the worker answers whole: labels are no stream
    """

    parse: Callable[[str], tuple[EngineRequest, Renderer]] | None = None
    shape: Shape | None = None
    model: str = ""
    user: str = ""
    limit_s: float = math.inf
    streams: bool = False


Read = Callable[[Request, bytes, Mapping[str, str]], Direct]


async def invoke(
    gateway: Gateway,
    request: Request,
    name: str | None,
    read: Read,
    headers: Mapping[str, str] | None = None,
    check: Check | None = None,
) -> Response:
    """Answer a request with a model, which is loaded first where loading on demand is allowed.

    `name` is None if only the body may name the model; if it does not either, the model of a
    single-model server answers. `headers` replace the client's headers for the worker; `check` is
    what a route checks beside. The deadline is the model's, counted from the request's head, or the
    body's own if that is earlier.
    """
    gateway.check_ready()
    if name is not None:
        name_model(gateway, request, name)
    async with AsyncExitStack() as resources:
        counted = resources.enter_context(Counted(gateway, request))
        headers = {**forwarded_headers(request), **(headers or {})}
        query = read_query(request)
        body = await read_body(gateway, request)
        kind = headers.get("content-type", "")
        await off_loop(len(body), check_form, kind, body)
        direct = await off_loop(len(body), read, request, body, headers)
        request.state.shape = direct.shape
        if check is not None:
            await check(request, body, headers)
        if name is None:
            named = direct.model or gateway.single_model
            if not named:
                raise BadRequest(NO_MODEL)
            name = normal_name(named).lstrip("/")
            name_model(gateway, request, name)
        name = choose_model(gateway, request, name, direct.user)
        used = await resources.enter_async_context(AsyncExitStack())
        async with loaded(gateway, request, name, used, direct.limit_s) as (model, end):
            # A model with its own code parses all bodies itself, whatever API they look like.
            if not model.in_engine:
                request.state.shape = None
            elif direct.parse is not None and not (direct.streams and model.task):
                return await _answer_directly(gateway, request, direct, model, end, resources)
            if model.in_engine and kind.partition(";")[0].strip().lower() != TEXT:
                await off_loop(len(body), check_count, body)
            await used.enter_async_context(gateway.admission.place(model.line, end))
            call = WorkerCall(gateway, model, body, headers, query, request.state.started, end)
            response = await call.answer(used.pop_all())
            counted.status = response.status_code
            return response
    raise AssertionError("it was returned or raised")


async def _answer_directly(
    gateway: Gateway,
    request: Request,
    direct: Direct,
    model: Model,
    end: float,
    resources: AsyncExitStack,
) -> Response:
    assert direct.parse is not None
    parsed, renderer = direct.parse(model.name)
    if parsed.adapter and parsed.adapter not in (model.name, request.state.alias):
        name_model(gateway, request, parsed.adapter)
        name = choose_model(gateway, request, parsed.adapter)
        model = await resources.enter_async_context(gateway.use(name))
        assert request.state.counted is not None
        request.state.counted.model = model.name
        check_engine(model)
        end = min(end, request.state.started + model.request_timeout_s)
    return await answer(gateway, model, parsed, renderer, end, resources)


async def describe(gateway: Gateway, request: Request) -> Model:
    """Load the path's model as `invoke` does; return it with its metadata (`/v2/models/{name}`).

    For an alias, this is the model with the largest weight.
    """
    gateway.check_ready()
    name, *_ = described_models(gateway, request.path_params["name"])
    with Counted(gateway, request):
        async with AsyncExitStack() as used, loaded(gateway, request, name, used) as (model, _):
            return model


@contextlib.asynccontextmanager
async def engine_model(
    gateway: Gateway, request: Request, name: str, limit_s: float = math.inf, user: str = ""
) -> AsyncIterator[tuple[Model, float, AsyncExitStack]]:
    """Load a model of the engine as `invoke` does, and hold it until the request's deadline.

    Yields the model, the deadline on the monotonic clock, and the stack of resources to close at
    the answer's end. Raises `NotOfTheEngine`.
    """
    gateway.check_ready()
    name_model(gateway, request, name)
    name = choose_model(gateway, request, name, user)
    async with AsyncExitStack() as resources:
        resources.enter_context(Counted(gateway, request))
        async with loaded(gateway, request, name, resources, limit_s) as (model, end):
            check_engine(model)
            yield model, end, resources


def check_version(request: Request, model: Model) -> None:
    """Raise `ModelNotFound` for another version than the one that is loaded."""
    version = request.path_params.get("version", model.version)
    if version != model.version:
        raise ModelNotFound(f"Model {model.name} has version {model.version}, not {version[:50]}")


def check_engine(model: Model) -> None:
    """Raise `NotOfTheEngine` for a model that answers by its own code."""
    if not model.in_engine:
        raise NotOfTheEngine(
            f"{model.name} answers by its own code: call /predictions/{model.name}"
        )


@contextlib.asynccontextmanager
async def loaded(
    gateway: Gateway,
    request: Request,
    name: str,
    used: AsyncExitStack,
    limit_s: float = math.inf,
) -> AsyncIterator[tuple[Model, float]]:
    """Load a model, which `used` then holds, for a request that has entered `Counted`.

    Yields the model, and the request's deadline on the monotonic clock. The context's body is
    cancelled then, or when the client disconnects. Raises `ClientDisconnect`, `Timeout`, or
    `Unavailable` if the model still waited for memory or disk.
    """
    gone, counted = False, request.state.counted
    assert counted is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        scope.cancel()

    started = request.state.started
    load_end = started + min(gateway.settings.request_timeout_s, limit_s)
    with CancelScope(deadline=load_end) as scope:
        watching = asyncio.create_task(watch())
        late = False
        try:
            model = await used.enter_async_context(gateway.use(name))
            counted.model = name
            check_version(request, model)
            scope.deadline = started + min(model.request_timeout_s, limit_s)
            yield model, scope.deadline
        except (Unavailable, EngineUnavailable):  # raised after waiting for a restarting process
            late = time.monotonic() >= scope.deadline
            if not late:
                raise
        finally:
            watching.cancel()
    if gone and scope.cancelled_caught:
        raise ClientDisconnect
    if late or scope.cancelled_caught:
        limit_s = scope.deadline - started
        waiting = gateway.registry.find(name)
        if waiting is not None and waiting.shortage is not None:
            raise eviction_timeout(waiting.shortage, limit_s)
        raise no_answer(limit_s)
