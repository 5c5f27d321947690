"""A collector of OpenTelemetry's spans on loopback: OTLP over HTTP, as its protocol has it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Span:
    """Ids are in hex, times in nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    is_error: bool
    attributes: dict[str, Any]
    service: str


class Collector:
    """Collects until it is closed. Without `go` no request is answered."""

    def __init__(self) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        self.go.set()
        self.status = 200
        self.headers: dict[str, str] = {}  # of the last request
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["content-length"]))
        self.reached.set()
        self.go.wait()
        if request.path != "/v1/traces" or request.headers["content-type"] != PROTOBUF:
            request.send_error(404)
            return
        self.headers = {k.lower(): v for k, v in request.headers.items()}
        if self.status == 200:
            self.bodies.append(body)
        answer = ExportTraceServiceResponse().SerializeToString()
        request.send_response(self.status)
        request.send_header("content-type", PROTOBUF)
        request.send_header("content-length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)

    @property
    def spans(self) -> list[Span]:
        """The spans in the order in which they began."""
        found = []
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = _values(resource.resource.attributes)
                for scope in resource.scope_spans:
                    found += [_span(span, about["service.name"]) for span in scope.spans]
        return sorted(found, key=lambda span: span.start)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def _span(span: Any, service: str) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == Status.STATUS_CODE_ERROR,
        _values(span.attributes),
        service,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
