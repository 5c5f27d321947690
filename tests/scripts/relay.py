"""A server whose answers are streams: the engine's own, one token at a time, over HTTP on TCP."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.engine.engines import EngineProcess


class Relay(ThreadingHTTPServer):
    """Sends server-sent events, or NDJSON where `sse` is false.

    After four tokens it waits for `go_on`. With `cut` it hangs up then.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: EngineProcess, model: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine, self.model = engine, model
        self.sse, self.cut = True, False
        self.go_on = threading.Event()
        self.go_on.set()
        self.accepts: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        relay = self.server
        relay.accepts.append(self.headers["accept"])
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if isinstance(body, str):  # the guides' form
            body = {"inputs": body, "parameters": {"max_new_tokens": 8}}
        url = f"/models/{relay.model}/generate"
        answer = relay.engine.open("POST", url, {**body, "stream": True})
        self.send_response(answer.status)
        kind = "text/event-stream; charset=utf-8" if relay.sse else "application/x-ndjson"
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, line in enumerate(answer):
            if number == 4:  # a token alone may be half a letter
                relay.go_on.wait(20)
                if relay.cut:
                    break
            data = b"data: " + line + b"\n" if relay.sse else line
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")
        relay.engine.drop(answer)


@contextlib.contextmanager
def relay(engine: EngineProcess, model: str) -> Iterator[Relay]:
    server = Relay(engine, model)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
