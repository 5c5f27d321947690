"""Servers behind a proxy with the behaviour that a test sets, which record their requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.serving.store.file_host import running

SERVED_BY = "x-served-by"


def names(count: int) -> tuple[str, ...]:
    """The names of servers, in their order behind a proxy."""
    return tuple(f"node{number}" for number in range(1, count + 1))


class Upstream(ThreadingHTTPServer):
    """Answers 200 to `/ping`, and all other requests by `act`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = name
        self.act: Callable[[Handler], None] = Handler.well
        self.requests: list[str] = []

    @property
    def port(self) -> int:
        return self.server_port

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores health checks that disconnect after the status."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet
    server: Upstream

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/ping":
            return self.well()
        self.server.requests.append(f"{self.command} {self.path}")
        return self.server.act(self)

    do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = _handle

    def well(self) -> None:
        self.answer(200, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header(SERVED_BY, self.server.name)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def drop(self) -> None:
        """Closes the connection without an answer."""
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def upstreams(count: int) -> Iterator[list[Upstream]]:
    with contextlib.ExitStack() as stack:
        started = [Upstream(name) for name in names(count)]
        for upstream in started:
            stack.enter_context(running(upstream))
        yield started
