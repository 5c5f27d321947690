"""An S3 server (moto) behind a proxy that fails on command."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from command.errors import Problem
from testbed.s3 import ACCESS, S3, client
from tests.serving.store.file_host import running

BUCKET, PREFIX, ENDING = "models", "kogpt2/", ".tar.gz"
ERRORS = {"403": "AccessDenied", "503": "SlowDown"}
HOP = {"connection", "transfer-encoding", "keep-alive"}


class Store:
    """`mode`: "" or one of `plan.STORE`. In mode `change`, `changing` is called with the model in
    mid-download. `environment` is for a client of the proxy."""

    def __init__(self, moto_port: int) -> None:
        self.mode = ""
        self.changing: Callable[[str], None] = lambda model: None
        self.client = client(f"http://127.0.0.1:{moto_port}")
        self.proxy = _Proxy(self, moto_port)
        self.environment = {
            **ACCESS,
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.proxy.server_port}",
            "MODEL_STORE": f"s3://{BUCKET}/{PREFIX}",
        }

    def put(self, model: str, archive: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=f"{PREFIX}{model}{ENDING}", Body=archive)


@contextlib.contextmanager
def store(log: Path) -> Iterator[Store]:
    """An empty store in a process of its own. Raises `Problem` without moto."""
    try:
        import moto  # noqa: F401
    except ImportError:
        raise Problem("chaos needs moto: scripts/test installs it") from None
    with S3(log) as server:
        found = Store(server.port)
        with running(found.proxy), contextlib.closing(found.client):
            try:
                found.client.create_bucket(Bucket=BUCKET)
                yield found
            finally:
                found.mode = ""  # ends what stalls


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, store: Store, moto_port: int) -> None:
        self.store, self.moto_port = store, moto_port
        super().__init__(("127.0.0.1", 0), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Close the connection at once in mode `gone`."""
        return self.store.mode != "gone"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: _Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        store = self.server.store
        self.close_connection = True
        mode = store.mode
        if mode in ERRORS:
            self._refuse(int(mode), ERRORS[mode])
            return
        answer, body = self._of_moto()
        whole = self.command == "GET" and answer.status in (200, 206) and ENDING in self.path
        if mode == "gone":
            return
        if mode == "stall" and not whole:
            self._stall()
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        half = len(body) // 2 if whole else len(body)
        self.wfile.write(body[:half])
        if not whole or mode == "truncate":
            return
        if mode == "stall":
            self._stall()
            return
        if mode == "change":
            path = unquote(self.path.partition("?")[0])
            store.changing(path.partition(PREFIX)[2].removesuffix(ENDING))
        self.wfile.write(body[half:])

    do_HEAD = do_GET

    def _of_moto(self) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.moto_port, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        connection.request(self.command, self.path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    def _refuse(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
        data = b"" if self.command == "HEAD" else body.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _stall(self) -> None:
        """Waits until the store has another mode."""
        while self.server.store.mode == "stall":
            time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        pass
