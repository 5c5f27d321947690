"""Calls of models' workers through Multi Model Server: headers, retries, answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import quote

from anyio import CancelScope
from starlette.responses import Response

from common.errors import EngineError
from common.worker_protocol import (
    REQUEST_HEADER,
    REQUEST_ID,
    SERVED_MODEL,
    TIMEOUT_HEADER,
    TOKENS_HEADER,
    TRACEPARENT,
    WORKER_HEADER,
)
from serving.api.gateway import Gateway
from serving.api.request import Request
from serving.api.request_body import header_text
from serving.errors import (
    BadRequest,
    MMSEnded,
    ServingError,
    Unavailable,
    WorkerFailed,
    no_answer,
)
from serving.mms.client import Answer, Query, message_of
from serving.mms.workers import MMS_GRACE_S
from serving.models.model import Model
from serving.tokens import current

MAX_HEADER_CHARACTERS = 6000  # all forwarded headers together; MMS accepts 8192
MAX_QUERY_CHARACTERS = 3000  # MMS accepts a request line of 4096
TARGET_MODEL = "x-amzn-sagemaker-target-model"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
# Only these client headers are forwarded: an unusual one can stop a worker (fault 3 of MMS).
FORWARDED = ("content-type", "accept", TARGET_MODEL, CUSTOM_ATTRIBUTES)
# A worker ends in two steps, its process and the process that watches it: 2 would be too few.
ATTEMPTS = 3
MAX_MMS_ENDS = 2  # per request; then it fails, as other models need MMS, too
RETRY_S = 0.1
AWS_ACCEPT = "x-amzn-sagemaker-accept"
# Headers dropped from a worker's answer: those of the connection, those that apply to the whole
# origin and so to other models, and those that Multi Model Server adds to each answer.
WITHHELD = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade", "content-length", "date", "server",
    "alt-svc", "clear-site-data", "set-cookie", "set-cookie2", "strict-transport-security",
    "cache-control", "expires", "pragma", "content-security-policy", "x-content-type-options",
    REQUEST_ID, WORKER_HEADER, TOKENS_HEADER, SERVED_MODEL,
}  # fmt: skip


@dataclass
class WorkerCall:
    """A request for a model's worker; `end` is its deadline on the monotonic clock."""

    gateway: Gateway
    model: Model
    body: bytes
    headers: dict[str, str]
    query: Query
    started: float
    end: float

    async def answer(self, used: AsyncExitStack) -> Response:
        """Return the worker's answer. Raises `Timeout`, `Unavailable`, `WorkerFailed`.

        If the client disconnects, the engine's part of the request is cancelled; Multi Model
        Server cannot cancel a request, so `used`, the stack of the model and its place in the
        queue, is closed only when the worker has answered.
        """
        id = self.headers[REQUEST_HEADER] = secrets.token_hex(8)

        async def ask() -> Answer:
            async with used:
                return await self._ask()

        spawn = self.gateway.registry.spawn
        task = spawn(ask())
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            spawn(self._cancel(id))
            raise
        if time.monotonic() >= self.end:  # the event loop was too busy to cancel in time
            raise no_answer(self.end - self.started)
        if self.model.in_engine:
            _count_tokens(answer)
        return _response(answer)

    async def _cancel(self, id: str) -> None:
        with contextlib.suppress(EngineError):
            await self.gateway.engine.cancel(id)

    async def _ask(self) -> Answer:
        """Return the worker's answer; send the request again if the worker was lost."""
        answer: Answer | None = None
        ends = 0
        for attempt in range(ATTEMPTS):
            if answer is not None and answer.status == 503:  # MMS has no worker now
                await asyncio.sleep(RETRY_S * 2**attempt)
            if attempt:
                left_s = self.end - time.monotonic()
                await self.gateway.recovery.wait_for(self.model, left_s)
            left_s = self.end - time.monotonic()
            if left_s <= 0:
                break
            try:
                answer = await self._ask_once(left_s)
            except Unavailable as error:  # MMS restarts
                ends += isinstance(error, MMSEnded)
                if ends == MAX_MMS_ENDS:
                    raise WorkerFailed(
                        f"Multi Model Server ended {MAX_MMS_ENDS} times during this request"
                    ) from None
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            if answer is not None and answer.status == 507 and await self._has_lost_memory():
                answer = None
            elif answer is not None and (answer.by_worker or answer.status not in (404, 500, 503)):
                break
        if answer is None or not answer.by_worker:
            raise _error_of_mms(self.model, answer)
        return answer

    async def _ask_once(self, left_s: float) -> Answer | None:
        """Send the request; return None if recovery cancels it, as MMS would not answer it."""
        model, headers = self.model, {**self.headers, TIMEOUT_HEADER: f"{left_s:.3f}"}
        timeout_s = left_s + MMS_GRACE_S
        with CancelScope() as scope:
            model.pending.add(scope)
            try:
                return await self.gateway.mms.invoke(
                    model.id, self.body, headers, timeout_s, self.query
                )
            finally:
                model.pending.remove(scope)
        return None

    async def _has_lost_memory(self) -> bool:
        """Return whether a restarted engine lost the model and has no memory to load it again.

        The request is then repeated; a request that can never fit gets 507.
        """
        if not self.model.in_engine:
            return False
        try:
            held = await self.gateway.engine.models()
        except EngineError:
            return True
        return all(model["name"] != self.model.engine_name for model in held)


def read_query(request: Request) -> Query:
    """Return a request's query, for models' own code. Raises `BadRequest` if too long for MMS."""
    size = len(request.scope["query_string"])
    if not size:
        return ()
    if size > MAX_QUERY_CHARACTERS:
        raise BadRequest(
            f"the query has {size} characters, at most {MAX_QUERY_CHARACTERS} are taken: send it"
            " as the body"
        )
    return request.query_params.multi_items()


def _error_of_mms(model: Model, answer: Answer | None) -> ServingError:
    """Return the error for a status that MMS itself sent, or for no answer at all."""
    if answer is None or answer.status == 404:
        return Unavailable(f"Model {model.name} is being loaded again")
    if answer.status == 503:
        return Unavailable(f"Model {model.name} has no worker now")
    return WorkerFailed(f"the worker of model {model.name} failed ({message_of(answer)})")


def _count_tokens(answer: Answer) -> None:
    """Count the tokens of an answer for the request's token of TOKENS_FILE."""
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
    """Return the headers for a worker. Raises `BadRequest` for those that MMS cannot forward."""
    forwarded = {REQUEST_ID: request.state.request_id}
    if request.state.traceparent is not None:
        forwarded[TRACEPARENT] = request.state.traceparent
    given = dict(reversed(request.headers.items()))  # the first of each name
    if AWS_ACCEPT in given:  # the name of Accept in the AWS client's calls for a stream
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
