"""Calls the gateway's HTTP routes within the process, and converts their errors to gRPC's.

https://github.com/grpc/grpc/blob/master/doc/statuscodes.md
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import grpc
from anyio import CancelScope
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from common.errors import cut
from common.worker_protocol import REQUEST_ID, SERVED_MODEL, TRACEPARENT
from serving.api.grpc.messages import message, methods
from serving.api.naming import CHOSEN, SESSION_ID
from serving.errors import BadRequest, ServingError, TooManyRequests

logger = logging.getLogger(__name__)

CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# Limit in characters: a header carries the message, where a byte beyond ASCII takes three
# characters, and clients accept headers of 8 KiB.
MAX_MESSAGE = 600
# Keys of a call's metadata that become HTTP headers.
FORWARDED = ("authorization", REQUEST_ID, TRACEPARENT, "tracestate", SESSION_ID)
# gRPC's own name for Retry-After: https://github.com/grpc/proposal/blob/master/A6-client-retries.md
PUSHBACK = "grpc-retry-pushback-ms"

# What gRPC raises at a write to, or an end of, a call that its client has ended.
CLIENT_GONE = (grpc.aio.InternalError, grpc.aio.UsageError)

SMALL_BYTES = 64 << 10  # an answer up to this size is sent even if others are unread

T = TypeVar("T")
Answering = Callable[[Any, Any], Awaitable[Any]]  # a request, or requests, and the call's context


@dataclass(frozen=True)
class Call:
    """A request to a route; `model` is the model already chosen for an alias, or ""."""

    path: str
    method: str = "GET"
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    model: str = ""


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class RouteError(ServingError):
    """A route's error, whose body is `{"error": message}`, or has `message` and other fields."""

    def __init__(self, reply: Reply) -> None:
        try:
            error = json.loads(reply.body)
            message = str(error.get("error") or error["message"])
        except (ValueError, KeyError, AttributeError):
            message = reply.body.decode("utf-8", "replace")
        super().__init__(message)
        self.status, self.headers = reply.status, reply.headers


Piece = Callable[[Reply, bytes], Awaitable[None]]


@dataclass(frozen=True)
class Routes:
    """Calls the HTTP routes of the gateway in this process: `asgi` answers them as on `port`."""

    asgi: ASGIApp
    port: int

    async def ask(
        self, call: Call, metadata: Iterable[tuple[str, Any]], piece: Piece | None = None
    ) -> Reply:
        """Return a route's answer; if given, `piece` gets its body in pieces.

        Cancelling the call ends the request, as a closed HTTP connection does. Raises `RouteError`.
        """
        reply, taken = Reply(), False

        async def receive() -> dict[str, Any]:
            nonlocal taken
            if taken:
                await asyncio.get_running_loop().create_future()  # for ever: the body is complete
            taken = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        async def send(event: Any) -> None:
            if event["type"] == "http.response.start":
                reply.status = event["status"]
                reply.headers = {k.decode(): v.decode("latin-1") for k, v in event["headers"]}
            elif piece is None or reply.status != 200:
                reply.body += event.get("body", b"")
            elif event.get("body"):
                await piece(reply, event["body"])

        await self.asgi(self._scope(call, metadata), receive, send)
        if reply.status >= 400:
            raise RouteError(reply)
        return reply

    def _scope(self, call: Call, metadata: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        headers = {k: v for k, v in metadata if k in FORWARDED and isinstance(v, str)}
        headers |= call.headers
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "2",
            "method": call.method,
            "scheme": "http",
            "path": call.path,
            "raw_path": quote(call.path).encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": None,
            "server": ("", self.port),
            CHOSEN: call.model,
        }


async def abort(context: Any, error: ServingError) -> None:
    """End a call with an error, by raising gRPC's `AbortError`."""
    other = grpc.StatusCode.INVALID_ARGUMENT if error.status < 500 else grpc.StatusCode.INTERNAL
    if isinstance(error, RouteError):
        context.set_trailing_metadata(trailing(error.headers))
    await context.abort(CODES.get(error.status, other), cut(error.message, MAX_MESSAGE))


class Idle:
    """The calls in which the server waits for the client, `limit` at most.

    A further one ends the call that has waited longest: calls without requests cannot block the
    port.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waits: OrderedDict[CancelScope, None] = OrderedDict()

    def add(self, wait: CancelScope) -> None:
        if len(self._waits) >= self._limit:
            self._waits.popitem(last=False)[0].cancel()
        self._waits[wait] = None

    def remove(self, wait: CancelScope) -> None:
        self._waits.pop(wait, None)

    async def run(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which waits for the client.

        Raises `TooManyRequests` if a newer call has ended this one.
        """
        with CancelScope() as wait:
            self.add(wait)
            try:
                return await work
            finally:
                self.remove(wait)
        raise superseded()


class Unread:
    """The bytes of answers that clients have not read, `limit` at most.

    gRPC holds an answer until its client has read it or closed the connection, even where the
    server ends the call before. A connection gets no further answer once it would have more unread
    than is left for all others: one that never reads takes half of the limit, two a third each.
    Small answers are counted, but not refused.
    """

    def __init__(self, limit: int) -> None:
        self._left_bytes = limit
        self._by_connection: Counter[str] = Counter()

    def add(self, size: int, connection: str) -> None:
        """Count an answer, until `remove`. Raises `TooManyRequests` above the limit.

        connection: the `peer()` of the call's context, which gRPC frees at the call's end
        """
        unread = self._by_connection[connection] + size
        if size > SMALL_BYTES and unread > self._left_bytes:
            raise TooManyRequests(
                "too many bytes of answers are unread on this connection, or on all connections of"
                " the gRPC port"
            )
        self._by_connection[connection] = unread
        self._left_bytes -= size

    def remove(self, size: int, connection: str) -> None:
        self._by_connection[connection] -= size
        if not self._by_connection[connection]:
            del self._by_connection[connection]
        self._left_bytes += size

    def answer(self, response: T, context: Any) -> T:
        """Return the only response of a call, and count it until the call is done; as `add`."""
        size, connection = response.ByteSize(), context.peer()  # type: ignore[attr-defined]
        self.add(size, connection)
        context.add_done_callback(lambda _: self.remove(size, connection))
        return response


def superseded() -> TooManyRequests:
    return TooManyRequests("too many calls wait for their clients; this one waited longest")


def with_request(idle: Idle, answer: Answering) -> Answering:
    """Wrap a method that takes one request to wait for it in `idle`; gRPC itself has no limit."""

    async def answer_one(requests: AsyncIterator[Any], context: Any) -> Any:
        request = await idle.run(anext(requests, None))
        if request is None:
            raise BadRequest("the call has no request")
        return await answer(request, context)

    return answer_one


async def parsed(messages: AsyncIterator[bytes], kind: Any) -> AsyncIterator[Any]:
    """Yield the requests of a call. Raises `BadRequest`; gRPC's own parser would say INTERNAL."""
    async for content in messages:
        try:
            request = kind.FromString(content)
        except DecodeError:
            raise BadRequest(f"the request is not a {kind.DESCRIPTOR.full_name}") from None
        yield request


def service(name: str, answers: Mapping[str, Answering], idle: Idle) -> Any:
    """Return the handler of a service; `answers` has the functions that answer its methods."""
    handlers = {}
    for method_name, method in methods(name).items():
        answer = answers[method_name]
        stream, unary = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        taken = message(method.input_type.full_name)
        handlers[method_name] = (stream if method.server_streaming else unary)(
            guarded(answer if method.client_streaming else with_request(idle, answer), taken),
            response_serializer=message(method.output_type.full_name).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(name, handlers)


def guarded(answer: Answering, kind: Any) -> Answering:
    """Wrap a method that takes requests of a `kind` to end its call at an error.

    Details of unexpected errors are only logged, and nothing of a call that its client has ended.
    """

    async def answer_or_abort(requests: AsyncIterator[bytes], context: Any) -> Any:
        try:
            return await answer(parsed(requests, kind), context)
        except grpc.aio.AbortError:
            raise
        except ServingError as error:
            await abort(context, error)
        except Exception as error:
            id = dict(context.trailing_metadata() or ()).get(REQUEST_ID) or str(uuid.uuid4())
            context.set_trailing_metadata(((REQUEST_ID, id),))
            logger.error("a gRPC call failed", exc_info=error, extra={"fields": {"request_id": id}})
            message = "an error inside the server; the log has it under the request id"
            await context.abort(grpc.StatusCode.INTERNAL, message)

    async def guarded_answer(requests: AsyncIterator[bytes], context: Any) -> Any:
        try:
            return await answer_or_abort(requests, context)
        except CLIENT_GONE:
            raise asyncio.CancelledError from None  # which gRPC does not log

    return guarded_answer


def trailing(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return an answer's trailing metadata: the request's id, an alias's model, the retry delay."""
    metadata = {name: headers.get(name) for name in (REQUEST_ID, SERVED_MODEL)}
    if "retry-after" in headers:
        metadata[PUSHBACK] = str(int(headers["retry-after"]) * 1000)
    return tuple((key, value) for key, value in metadata.items() if value is not None)
