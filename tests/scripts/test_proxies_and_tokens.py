"""Calls to this machine use no proxy, and carry the token."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from command.errors import Problem
from scripts.traffic.loads import Prometheus, models_of
from testbed.process import fetch
from tests.fleet.upstream import Handler, upstreams

TOKEN = "infer-me"  # noqa: S105


def act(handler: Handler) -> None:
    """Of a server with `INFERENCE_TOKEN`: lists its models, and counts their loads."""
    status, body = 200, b'kogpt2_model_load_seconds_count{model="a"} 2\n'
    if not handler.path.startswith("/metrics"):
        allowed = handler.headers["Authorization"] == f"Bearer {TOKEN}"
        models = json.dumps({"models": [{"modelName": "시/봄"}]}).encode()
        status, body = (200, models) if allowed else (401, b"{}")
    handler.answer(status, body)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with a token, where the environment names a proxy that does not exist."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy", "INFERENCE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with upstreams(1) as [server]:
        server.act = act
        yield f"http://127.0.0.1:{server.port}"


def test_a_load_test_and_a_benchmark_reach_a_server_with_a_token(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Problem, match="INFERENCE_TOKEN"):
        models_of(url)
    monkeypatch.setenv("INFERENCE_TOKEN", TOKEN)
    assert models_of(url) == ("시/봄",)
    assert "count" in Prometheus(url).end()
    assert b"kogpt2_model" in fetch(f"{url}/metrics", 30)
