"""OpenTelemetry spans of requests, sent by OTLP over HTTP. Imported only if tracing is on.

A request's span has child spans:

    POST /predictions/{name}
        load      until the model is ready, where it was not
        queue     until the request has one of the model's places
        prompt    until the first token of a stream
        tokens    from the first token to the last
        answer    in place of the last two: an answer that comes whole, from a worker or the engine

A batch of JSON lines has one span, without children but `load`, however many lines it has; its
attributes are their number and the sums of their tokens.

The gateway's parts are wrapped once at the start, so requests have no overhead if tracing is off.
The SDK reads the standard variables (`OTEL_*`) itself. Attributes have the names of
https://opentelemetry.io/docs/specs/semconv/; none holds a prompt, an answer or an error's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from anyio import move_on_after
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import SettingError, cut
from common.worker_protocol import REQUEST_ID, TOKENS_HEADER
from serving.api.gateway import Gateway
from serving.api.http_protocol import HEALTH_PATHS
from serving.api.request import LineCounts, RequestState
from serving.mms.client import Answer
from serving.models.model import Model, State
from serving.models.registry import Registry

logger = logging.getLogger(__name__)

SERVICE = "kogpt2-serving"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES names another
PROTOCOL = "http/protobuf"
UNTRACED = HEALTH_PATHS | {"/metrics"}
# Time to send the last spans at a stop, as far as DRAIN_S has time left. Longer: a collector that
# does not answer delays each stop more. Shorter: a slow collector loses the last seconds' spans.
FLUSH_S, MIN_FLUSH_S = 3.0, 0.5
LOG_EVERY_S = 60.0  # each message at most once in that time, however often an export fails
CONTEXT = TraceContextTextMapPropagator()
CONTEXT_HEADERS = {name.encode() for name in CONTEXT.fields}

REQUESTED_MODEL, ANSWERING_MODEL = "gen_ai.request.model", "gen_ai.response.model"
PROMPT_TOKENS, ANSWER_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
LINES, ERROR_LINES = "kogpt2.lines", "kogpt2.error_lines"
STATUS, ERROR = "http.response.status_code", "error.type"


@contextlib.asynccontextmanager
async def traced(gateway: Gateway, app: ASGIApp) -> AsyncIterator[ASGIApp]:
    """Trace the gateway's requests; yield the application to serve.

    Raises `SettingError` for a wrong variable `OTEL_*`.
    """
    provider = _provider()
    tracer = provider.get_tracer(SERVICE)
    parts: Any = gateway
    parts.admission = _Admission(gateway.admission, tracer)
    parts.on_demand = _OnDemand(gateway.on_demand, tracer, gateway.registry)
    parts.engine = _Engine(gateway.engine, tracer)
    parts.mms = _Workers(gateway.mms, tracer)
    try:
        yield _App(app, tracer)
    finally:
        left_s = gateway.drain_end - time.monotonic()
        with move_on_after(min(FLUSH_S, max(left_s, MIN_FLUSH_S)), shield=True):
            await asyncio.to_thread(_close, provider)  # a hanging thread ends with the process


def _provider() -> TracerProvider:
    for name in [name for name, value in os.environ.items() if name.startswith("OTEL_")]:
        if not os.environ[name]:
            del os.environ[name]  # empty means unset, which not every version of the SDK respects
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL)
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general)
    if protocol != PROTOCOL:
        raise SettingError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, must be {PROTOCOL!r}")
    log = logging.getLogger("opentelemetry")
    log.propagate, log.handlers = False, [_Seldom()]
    try:
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME)).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        # Its queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE): spans that do not fit are dropped.
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        raise SettingError(f"a variable OTEL_* has a wrong value: {error}") from None
    return provider


def _close(provider: TracerProvider) -> None:
    provider.force_flush()
    provider.shutdown()


class _Seldom(logging.Handler):
    """Passes OpenTelemetry's messages on to the server's log, each once in `LOG_EVERY_S`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next: dict[str, float] = {}  # by message template: there are some twenty

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next.get(record.msg, 0):
            self._next[record.msg] = now + LOG_EVERY_S
            error = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            logger.warning("traces: %s%s", record.getMessage(), error)


@dataclass
class _Request:
    """A request that is traced, and the sums of tokens of a batch's lines."""

    scope: Scope
    prompt_tokens: int = 0
    answer_tokens: int = 0

    @property
    def batch(self) -> LineCounts | None:
        state: RequestState | None = self.scope.get("state")
        return None if state is None else state.batch


_traced: ContextVar[_Request | None] = ContextVar("traced", default=None)


class _App:
    """Gives each request a span, a child of its `traceparent` header, which it replaces."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        sent = {k.decode(): v.decode("latin-1") for k, v in headers if k in CONTEXT_HEADERS}
        status = 0

        async def send_noting(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        with self._tracer.start_as_current_span(
            scope["method"],
            CONTEXT.extract(sent),
            SpanKind.SERVER,
            {
                "http.request.method": scope["method"],
                "url.path": cut(scope["path"]),
                "url.scheme": scope["scheme"],
            },
        ) as span:
            own: dict[str, str] = {}
            CONTEXT.inject(own)
            others = [(k, v) for k, v in headers if k not in CONTEXT_HEADERS]
            scope["headers"] = [*others, *((k.encode(), v.encode()) for k, v in own.items())]
            request = _Request(scope)
            _traced.set(request)
            try:
                await self._app(scope, receive, send_noting)
            finally:
                _describe(span, request, status)


def _describe(span: Span, request: _Request, status: int) -> None:
    """Set a span's attributes once its request is answered; `status` is 0 without an answer."""
    scope, batch = request.scope, request.batch
    state: RequestState = scope["state"]
    if batch is not None:
        span.set_attribute(LINES, batch.lines)
        span.set_attribute(ERROR_LINES, batch.error_lines)
        span.set_attribute(PROMPT_TOKENS, request.prompt_tokens)
        span.set_attribute(ANSWER_TOKENS, request.answer_tokens)
    if (route := scope.get("route")) is not None:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    if state.model is not None:
        span.set_attribute(REQUESTED_MODEL, cut(state.alias or state.model))
        span.set_attribute(ANSWERING_MODEL, cut(state.model))
    span.set_attribute(f"http.response.header.{REQUEST_ID}", [state.request_id])
    if status:
        span.set_attribute(STATUS, status)
    if status >= 500:
        span.set_attribute(ERROR, str(status))
        span.set_status(StatusCode.ERROR)


class _Part:
    """A proxy of a part of the gateway; subclasses trace some of its methods."""

    def __init__(self, part: Any, tracer: Tracer) -> None:
        self._part, self._tracer = part, tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[Span]:
        """Start a child of the current span; it does not become current, as generators hold it.

        Parts of a batch's lines get a span that records nothing.
        """
        request = _traced.get()
        of_line = request is not None and request.batch is not None
        span = INVALID_SPAN if of_line else self._tracer.start_span(name)
        try:
            yield span
        except BaseException as error:
            span.set_attribute(ERROR, type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            span.end()

    @contextlib.asynccontextmanager
    async def _until_entered(
        self, name: str, manager: AbstractAsyncContextManager[Any]
    ) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            with self._span(name):
                value = await stack.enter_async_context(manager)
            yield value


class _Admission(_Part):
    def place(self, *given: Any) -> AbstractAsyncContextManager[None]:
        return self._until_entered("queue", self._part.place(*given))


class _OnDemand(_Part):
    def __init__(self, part: Any, tracer: Tracer, registry: Registry) -> None:
        super().__init__(part, tracer)
        self._registry = registry

    def use(self, name: str) -> AbstractAsyncContextManager[Model]:
        model = self._registry.find(name)
        used: AbstractAsyncContextManager[Model] = self._part.use(name)
        ready = model is not None and model.state is State.READY
        return used if ready else self._until_entered("load", used)


class _Workers(_Part):
    async def invoke(self, *given: Any) -> Answer:
        with self._span("answer") as span:
            answer: Answer = await self._part.invoke(*given)
            span.set_attribute(STATUS, answer.status)
            if (counts := answer.headers.get(TOKENS_HEADER)) is not None:
                _count(span, *map(int, counts.split()))
            return answer


class _Engine(_Part):
    async def generate(self, *given: Any) -> dict[str, Any]:
        with self._span("answer") as span:
            result: dict[str, Any] = await self._part.generate(*given)
            made = sum(completion["tokens"] for completion in result["completions"])
            _count(span, result["prompt_tokens"], made)
            return result

    async def stream(self, *given: Any) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(self._part.stream(*given)) as items:
            with self._span("prompt"):
                first = await anext(items, None)
            if first is None:
                return
            prompt, made = first.get("prompt_tokens", 0), 1
            with self._span("tokens") as span:
                try:
                    yield first
                    async for item in items:
                        made += 1
                        yield item
                finally:
                    _count(span, prompt, made)


def _count(span: Span, prompt: int, made: int) -> None:
    """Set the tokens of an answer; those of a batch's line are added up."""
    request = _traced.get()
    if span is INVALID_SPAN and request is not None:
        request.prompt_tokens += prompt
        request.answer_tokens += made
    span.set_attribute(PROMPT_TOKENS, prompt)
    span.set_attribute(ANSWER_TOKENS, made)
