"""A web server on loopback that gives files with ETags."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileHost(ThreadingHTTPServer):
    def handle_error(self, *arguments: object) -> None:
        """Ignore clients that hang up: that is how one requests the beginning only."""


class FileHandler(BaseHTTPRequestHandler):
    """An HTTP handler whose subclass answers by `send`."""

    protocol_version = "HTTP/1.1"

    def send(self, status: int, data: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"ETag": '"v1"', "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def running(host: ThreadingHTTPServer) -> Iterator[None]:
    """Serve in the block; then close the host."""
    with host:
        thread = threading.Thread(target=host.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            host.shutdown()
            thread.join()
