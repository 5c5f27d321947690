"""Has a model answer a request: through Multi Model Server, by the model's worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.errors import EngineError
from serving.api.common import (
    CUSTOM_ATTRIBUTES,
    TARGET_MODEL,
    Gateway,
    header_text,
    read_body,
)
from serving.api.stream import open_stream, wanted
from serving.errors import BadRequest, ServingError, Unavailable, WorkerFailed
from serving.mms_client import REQUEST_HEADER, TIMEOUT_HEADER, Answer, Query, message_of
from serving.model import Model
from serving.workers import MMS_GRACE_S

MAX_HEADER_CHARACTERS = 6000  # together; MMS takes 8192
MAX_QUERY_CHARACTERS = 3000  # MMS takes a first line of 4096
# Of a client's headers only these reach a worker: an odd one can stop it (fault 3 of MMS).
FORWARDED = ("content-type", "accept", TARGET_MODEL, CUSTOM_ATTRIBUTES)
# A worker dies in two steps, its process and the one that watches it, so twice is not enough.
ATTEMPTS = 3
AWS_ACCEPT = "x-amzn-sagemaker-accept"
# Of a worker's headers only these reach the client.
RETURNED = ("retry-after", CUSTOM_ATTRIBUTES)


async def invoke(
    gateway: Gateway, request: Request, name: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Has a model answer a request, loading it first where that is allowed.

    `headers` are for the worker, in place of the client's.
    """
    if gateway.draining:
        raise Unavailable("the server is stopping", retry_after_s=5)
    if not gateway.adopted:
        raise Unavailable("the server is starting", retry_after_s=1)
    request.state.model = name
    async with AsyncExitStack() as resources:
        counted = resources.enter_context(_Counted(gateway))
        headers = {**forwarded_headers(request), **(headers or {})}
        body = await read_body(request, gateway.settings.max_request_bytes)
        model = await resources.enter_async_context(gateway.use(name))
        counted.model = name
        # Elsewhere a body's "stream" is the model's own matter.
        stream = wanted(body, headers) if model.in_engine else None
        if stream is not None:
            return await open_stream(gateway, model, stream, headers.get("accept", ""), resources)
        headers[REQUEST_HEADER] = secrets.token_hex(8)
        async with _cancelled_when_gone(gateway, request, headers[REQUEST_HEADER]):
            answer = await _ask(gateway, model, body, headers, _query(request))
        counted.status = answer.status
        return _response(answer)


class _Counted:
    """A request that is being answered, until it is."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = time.monotonic()
        self.model = ""  # a name that is no model is no label
        self.status = 200

    def __enter__(self) -> _Counted:
        self._gateway.requests += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, ServingError | EngineError):
            self.status = error.status
        elif isinstance(error, ClientDisconnect | asyncio.CancelledError):
            self.status = 499
        elif error is not None:
            self.status = 500
        self._gateway.requests -= 1
        seconds = time.monotonic() - self._started
        self._gateway.metrics.request(self.model, self.status, seconds)


@contextlib.asynccontextmanager
async def _cancelled_when_gone(
    gateway: Gateway, request: Request, request_id: str
) -> AsyncIterator[None]:
    """Tells the engine when the client goes away, which MMS does not: the answer then comes soon,
    and the model is in use until it does."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        with contextlib.suppress(EngineError):
            await gateway.engine.cancel(request_id)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


def _query(request: Request) -> Query:
    """For services of Multi Model Server. Raises `BadRequest` for one that it could not take."""
    size = len(request.url.query)
    if size > MAX_QUERY_CHARACTERS:
        raise BadRequest(
            f"the query has {size} characters, at most {MAX_QUERY_CHARACTERS} are taken: send it"
            " as the body"
        )
    return request.query_params.multi_items()


async def _ask(
    gateway: Gateway, model: Model, body: bytes, headers: dict[str, str], query: Query
) -> Answer:
    """The worker's answer. One that is lost meanwhile is asked again when it is back; a request
    that kills whoever answers it is given up."""
    limit_s = model.request_timeout_s
    headers = {**headers, TIMEOUT_HEADER: f"{limit_s:g}"}
    end = time.monotonic() + limit_s + MMS_GRACE_S
    answer: Answer | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            await gateway.recovery.wait_for(model, end - time.monotonic())
        try:
            left_s = max(end - time.monotonic(), 1.0)
            answer = await _ask_once(gateway, model, body, headers, query, left_s)
        except Unavailable:  # MMS is being started again
            if attempt == ATTEMPTS - 1:
                raise
            continue
        if answer is not None and (answer.by_worker or answer.status not in (404, 500, 503)):
            break
    if answer is None or not answer.by_worker:
        raise _error_of_mms(model, answer)
    return answer


async def _ask_once(
    gateway: Gateway,
    model: Model,
    body: bytes,
    headers: dict[str, str],
    query: Query,
    timeout_s: float,
) -> Answer | None:
    """None if the worker is given up meanwhile: MMS would not answer then."""
    call = asyncio.create_task(gateway.mms.invoke(model.id, body, headers, timeout_s, query))
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


def forwarded_headers(request: Request) -> dict[str, str]:
    """The headers for a worker. Raises `BadRequest` for one that it could not take."""
    found = {"x-request-id": request.state.request_id}
    for name in FORWARDED:
        value = request.headers.get(name)
        if name == "accept":  # the AWS client's call for a stream has another name for it
            value = request.headers.get(AWS_ACCEPT, value)
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
    return found
