"""Answers a body of JSON lines (`application/jsonlines`), each line as a request of its own.

The answer has a line for each line that is not blank, in their order: the model's JSON, or
`{"error": {"code", "type", "message"}}`. Both bodies are streams, and the answer begins while the
body still arrives. A line is read, authorized, queued, timed and counted like the body of a single
request, with these differences: 429 and 503 are waited for, and all batches together leave one of
the model's places to single requests, so that they do not wait for batches to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from anyio import CancelScope
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from common.errors import ServiceError, cut
from common.media_types import JSON, JSON_LINES, accepted, media_type
from serving.api.access import Right, check_token
from serving.api.answering import TokenStream
from serving.api.body_lines import STALL_S, BodyLines
from serving.api.error_responses import error_response
from serving.api.gateway import Gateway
from serving.api.http_protocol import DUPLEX
from serving.api.invoke import Check, Read, invoke, loaded
from serving.api.naming import CHOSEN, choose_model, name_model
from serving.api.request import Counted, LineCounts, Request
from serving.api.request_body import LARGE_BYTES, check_encoding, off_loop
from serving.api.worker_calls import AWS_ACCEPT
from serving.errors import BadRequest, BodyTooLarge, TooManyRequests, Unavailable, WorkerFailed
from serving.models.model import Model
from serving.names import normal_name
from serving.tokens import Token

NO_MODEL = (
    "say which model answers the lines: /predictions/{name}, X-Amzn-SageMaker-Target-Model,"
    " ?model_name=, or CustomAttributes model=NAME"
)
# Lines of a batch that run or wait for earlier lines to be sent. More: faster where some lines take
# much longer than others; fewer: less memory.
MAX_PENDING = 64
MAX_UNSENT_BYTES = 8 << 20  # of their answers; above it no line begins
# Beginning with the first refusal; then the line's answer is the refusal. A restart takes seconds.
PATIENCE_S = 600.0
REFUSED = (429, 503)
REPLACED = {"content-type", "accept", AWS_ACCEPT, "content-length", "transfer-encoding", "expect"}


def is_lines(request: Request) -> bool:
    kind = request.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower() == JSON_LINES


async def invoke_lines(
    gateway: Gateway,
    request: Request,
    name: str | None,
    read: Read,
    check: Check | None = None,
) -> Response:
    """Answer each line of a body with a model; the arguments are those of `invoke`.

    The model is loaded before the answer begins. Raises what `invoke` does as far as it does not
    depend on a line, and `BadRequest` for a body without lines.
    """
    gateway.check_ready()
    name = name or gateway.single_model
    if not name:
        raise BadRequest(NO_MODEL)
    name = normal_name(name).lstrip("/")
    name_model(gateway, request, name)
    check_encoding(request)
    headers = request.headers
    media_type(headers.get("content-type"))
    accepted(headers.get(AWS_ACCEPT, headers.get("accept")), (JSON_LINES, JSON))
    if check is not None:
        await check(request, b"", {})
    async with AsyncExitStack() as resources:
        counted = resources.enter_context(Counted(gateway, request))
        chosen = choose_model(gateway, request, name)
        lines = BodyLines(gateway, request)
        response = LinesResponse(gateway, request, name, chosen, read, lines)
        probe = response.request_of(0, b"")
        probe.state.counted = counted
        request.scope[DUPLEX] = response.waits_since
        resources.callback(request.scope.pop, DUPLEX)
        async with AsyncExitStack() as used, loaded(gateway, probe, chosen, used) as (model, _):
            response.places = _places(gateway, model)
        await lines.first()
        counted.status = 0  # its lines are counted
        response.resources = resources.pop_all()
    return response


def _places(gateway: Gateway, model: Model) -> asyncio.Semaphore:
    """Return the semaphore of a model's places for lines: all but one, and at least one."""
    places = gateway.line_places.get(model.name)
    if places is None:
        places = asyncio.Semaphore(max(model.line.capacity - 1, 1))
        gateway.line_places[model.name] = places
    return places


class LinesResponse(StreamingResponse):
    """The answers to a body's lines. A stop of the server breaks it off after the running lines.

    resources: closed at the end of the answer
    places: held by each running line
    """

    resources: AsyncExitStack
    places: asyncio.Semaphore

    def __init__(
        self,
        gateway: Gateway,
        request: Request,
        name: str,
        chosen: str,
        read: Read,
        lines: BodyLines,
    ) -> None:
        super().__init__(
            self._pieces(), media_type=JSON_LINES, headers={"cache-control": "no-store"}
        )
        self._gateway, self._request, self._name, self._chosen = gateway, request, name, chosen
        self._read, self._lines = read, lines
        given = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in REPLACED]
        kind = JSON.encode()
        self._line_headers = [*given, (b"content-type", kind), (b"accept", kind)]
        self._counts = LineCounts()
        self._pending: deque[asyncio.Task[bytes]] = deque()
        self._unsent_bytes = 0
        self._failure: Exception | None = None
        self._begun, self._sent = asyncio.Event(), asyncio.Event()
        self._all_begun = False
        self._sending_since: float | None = None  # while an answer is being sent
        self._sent_at = 0.0  # the last one, on the monotonic clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._request.state
        state.batch = self._counts
        _end(state.token)  # each line counts instead
        state.token = None
        gone = False

        async def read() -> None:
            nonlocal gone
            try:
                await self._lines.read(self._stalls)
            except ClientDisconnect:
                gone = True
            finally:
                work.cancel()

        async def send_noting(message: Message) -> None:
            self._sending_since = time.monotonic()
            await send(message)
            self._sending_since, self._sent_at = None, time.monotonic()

        async def never() -> Message:
            await asyncio.Event().wait()
            raise AssertionError("the event is never set")

        async with self.resources:
            with CancelScope() as work:
                beginning = asyncio.create_task(self._begin())
                beginning.add_done_callback(self._ended)
                tasks = [asyncio.create_task(read()), asyncio.create_task(self._stop(beginning))]
                try:
                    await super().__call__(scope, never, send_noting)
                finally:
                    for task in (*tasks, beginning, *self._pending):
                        task.cancel()
            if gone and work.cancelled_caught:
                raise ClientDisconnect

    async def _stop(self, beginning: asyncio.Task[None]) -> None:
        await self._gateway.stopping.wait()
        beginning.cancel()

    def _ended(self, beginning: asyncio.Task[None]) -> None:
        if beginning.cancelled():
            self._failure = _stopping()
        elif (error := beginning.exception()) is not None:
            assert isinstance(error, Exception)
            self._failure = error
        self._all_begun = True
        self._begun.set()

    def _stalls(self) -> bool:
        since = self._sending_since
        return since is not None and time.monotonic() - since >= STALL_S

    def waits_since(self) -> float | None:
        """Return since when the client owes the next line, None while it may wait for an answer."""
        since = self._lines.waits_since
        if since is None or self._pending or self._sending_since is not None:
            return None
        return max(since, self._sent_at)

    async def _begin(self) -> None:
        """Begin one line after the other, as fast as places and the client's reading allow."""
        number = 0
        while (line := await self._lines.next()) is not None:
            number += 1
            while len(self._pending) >= MAX_PENDING or self._unsent_bytes > MAX_UNSENT_BYTES:
                self._sent.clear()
                await self._sent.wait()
            request = self.request_of(number, line if isinstance(line, bytes) else b"")
            error = line if isinstance(line, BodyTooLarge) else await self._authorize(request)
            token = request.state.token
            try:
                await self.places.acquire()
            except asyncio.CancelledError:
                _end(token)
                raise
            task = asyncio.create_task(self._answer(number, line, request, error))
            # A task that is cancelled before it begins has no `finally`.
            task.add_done_callback(functools.partial(self._answered, token))
            self._pending.append(task)
            self._begun.set()

    async def _authorize(self, request: Request) -> ServiceError | None:
        """Count a line for its token, within the token's limits; return an error for the line."""
        while True:
            try:
                check_token(self._gateway, request, Right.CALL)
            except TooManyRequests as error:
                running = [task for task in self._pending if not task.done()]
                wait_s = error.retry_after_s or 1.0
                if running:
                    await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(wait_s)
            except ServiceError as error:
                return error
            else:
                return None

    def _answered(self, token: Token | None, task: asyncio.Task[bytes]) -> None:
        self.places.release()
        _end(token)
        if not task.cancelled() and task.exception() is None:
            self._unsent_bytes += len(task.result())

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            while not self._pending:
                if self._failure is not None:
                    raise self._failure
                if self._all_begun:
                    return
                self._begun.clear()
                await self._begun.wait()
            await asyncio.wait((self._pending[0],))  # a cancellation must not be passed on to it
            answers: list[bytes] = []
            while self._pending and self._pending[0].done():
                if answers and self._pending[0].exception() is not None:
                    break  # raised once they are sent
                answers.append(self._pending.popleft().result())
            yield b"".join(answers)
            self._unsent_bytes -= sum(map(len, answers))
            self._sent.set()

    def request_of(self, number: int, line: bytes) -> Request:
        """Return a request whose body is a line; it is never disconnected, but cancelled."""
        scope = {
            **self._request.scope,
            "headers": self._line_headers,
            "state": self._request.state.of_line(number),
            CHOSEN: self._chosen,
        }
        body = [line]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": body.pop(), "more_body": False}

        return Request(scope, receive)

    async def _answer(
        self, number: int, line: bytes | BodyTooLarge, request: Request, error: ServiceError | None
    ) -> bytes:
        """Return the line of an answer. Raises `Unavailable` if the server stops before."""
        self._counts.lines += 1
        try:
            if error is not None:
                raise error
            assert isinstance(line, bytes)
            request.state.started = time.monotonic()
            return await self._until_accepted(number, line, request)
        except Exception as failure:
            if self._gateway.draining and isinstance(failure, Unavailable):
                raise
            self._counts.error_lines += 1
            request.state.shape = None
            return b'{"error": ' + bytes(error_response(request, failure).body) + b"}\n"

    async def _until_accepted(self, number: int, line: bytes, request: Request) -> bytes:
        """Return a line's answer, tried again while the server is busy or restarts a process."""
        refused_at: float | None = None
        while True:
            try:
                response = await self._invoke(request)
                if response.status_code not in REFUSED:
                    return await _line_of(response, self._counts)
                retry_after = response.headers.get("retry-after", "1")
                wait_s = float(retry_after) if retry_after.isdecimal() else 1.0
                last: Exception | None = None
            except ServiceError as error:
                if error.status not in REFUSED:
                    raise
                wait_s, last = error.retry_after_s or 1.0, error
            if self._gateway.draining:
                raise _stopping()
            if refused_at is None:
                refused_at = time.monotonic()
            if time.monotonic() + wait_s > refused_at + PATIENCE_S:
                if last is not None:
                    raise last
                return await _line_of(response, self._counts)
            await asyncio.sleep(wait_s)
            token = request.state.token
            request = self.request_of(number, line)
            request.state.token = token

    async def _invoke(self, request: Request) -> Response:
        try:
            response = await invoke(self._gateway, request, self._name, self._read)
        finally:
            self._gateway.body_bytes -= request.state.body_bytes
            request.state.body_bytes = 0
        if isinstance(response, TokenStream):
            await response.close()
            raise BadRequest('a line is answered whole: leave out "stream"')
        return response


def _end(token: Token | None) -> None:
    """End the request that a line is for its token."""
    if token is not None:
        token.end()


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping", retry_after_s=5)


async def _line_of(response: Response, counts: LineCounts) -> bytes:
    """Return a response as one line with its end. Raises `WorkerFailed` for what is no text."""
    body = bytes(response.body)
    if response.status_code >= 400:
        counts.error_lines += 1
        return await off_loop(len(body), _error_line, response.status_code, body)
    if "json" in response.headers.get("content-type", "") and b"\n" not in body:
        return body.strip() + b"\n"
    return await off_loop(len(body), _one_line, body)


def _one_line(body: bytes) -> bytes:
    """Write JSON without line ends, and any other text as a JSON string."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise WorkerFailed("the model's answer is not text, so it cannot be a line") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _error_line(status: int, body: bytes) -> bytes:
    text = body.decode("utf-8", "replace")
    error: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        error = json.loads(text)
    if not (isinstance(error, dict) and "message" in error):
        message = cut(text, LARGE_BYTES)
        error = {"code": status, "type": "ModelError", "message": message}
    line = json.dumps({"error": error}, ensure_ascii=False)
    return line.encode("utf-8", "backslashreplace") + b"\n"
