"""A collector of OpenTelemetry's spans on loopback: OTLP over HTTP, as its protocol has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.serving.store.file_host import FileHandler, FileHost, running

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


class Collector(FileHost):
    """Without `go` no request is answered."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.go, self.reached = threading.Event(), threading.Event()
        self.go.set()
        self.status = 200
        self.headers: dict[str, str] = {}  # of the last request
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def serve_forever(self, poll_interval: float = 0.02) -> None:
        super().serve_forever(poll_interval)

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


class Handler(FileHandler):
    server: Collector

    def do_POST(self) -> None:
        collector = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        collector.reached.set()
        collector.go.wait()
        if self.path != "/v1/traces" or self.headers["content-type"] != PROTOBUF:
            self.send(404)
            return
        collector.headers = {k.lower(): v for k, v in self.headers.items()}
        if collector.status == 200:
            collector.bodies.append(body)
        self.send(collector.status, headers={"Content-Type": PROTOBUF})  # an empty message


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with running(collector):
        yield collector
        collector.go.set()


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
