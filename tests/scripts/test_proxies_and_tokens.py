"""Calls to this machine use no proxy, and carry the token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from command.errors import Problem
from scripts.traffic.loads import Prometheus, models_of
from testbed.process import fetch

TOKEN = "infer-me"  # noqa: S105


class Handler(BaseHTTPRequestHandler):
    """A server with `INFERENCE_TOKEN`: lists its models, and counts their loads."""

    def do_GET(self) -> None:
        status, body = 200, b'kogpt2_model_load_seconds_count{model="a"} 2\n'
        if not self.path.startswith("/metrics"):
            allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
            models = json.dumps({"models": [{"modelName": "시/봄"}]}).encode()
            status, body = (200, models) if allowed else (401, b"{}")
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Such a server, where the environment names a proxy that does not exist."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy", "INFERENCE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_load_test_and_a_benchmark_reach_a_server_with_a_token(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Problem, match="INFERENCE_TOKEN"):
        models_of(url)
    monkeypatch.setenv("INFERENCE_TOKEN", TOKEN)
    assert models_of(url) == ("시/봄",)
    assert "count" in Prometheus(url).end()
    assert b"kogpt2_model" in fetch(f"{url}/metrics", 30)
