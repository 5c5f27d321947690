"""What the log has of requests, and what a browser may do with answers."""

from __future__ import annotations

import logging

import pytest

from common.worker_protocol import WORKER_HEADER
from serving.mms.client import Answer
from tests.serving.api.gateways import World

PATH = "/predictions/봄"


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if hasattr(record, "fields")]


async def test_each_request_is_logged_but_those_for_health_and_metrics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    caplog.set_level(logging.INFO)
    for path in ("/ping", "/health", "/metrics"):
        assert (await world.call("GET", path))[0] == 200
    assert fields(caplog) == []
    await world.call("POST", PATH)
    (logged,) = fields(caplog)
    assert (logged["model"], logged["path"], logged["status"]) == ("봄", PATH, 200)


async def test_the_traceback_of_a_defect_has_the_id_of_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_: int) -> None:
        raise KeyError("겨울")

    world = World()
    world.mms.answer = fail  # type: ignore[assignment]
    status, headers, body = await world.call("POST", PATH, x_request_id="find-me")
    assert (status, headers["x-request-id"]) == (500, "find-me")
    assert "겨울" not in body.decode()
    (failed,) = (record for record in caplog.records if record.message == "a request failed")
    assert "KeyError: '겨울'" in (failed.exc_text or "")
    assert fields(caplog)[0] == {"request_id": "find-me"}


async def test_a_browser_runs_no_answer_as_the_consoles_origin() -> None:
    async def script(_: int) -> Answer:
        own = {"Content-Security-Policy": "script-src *", "X-Content-Type-Options": "no"}
        page = "<script>alert('봄')</script>".encode()
        return Answer(200, {"content-type": "text/html", WORKER_HEADER: "1", **own}, page)

    world = World()
    world.mms.answer = script
    status, headers, _ = await world.call("POST", PATH)
    assert (status, headers["content-type"]) == (200, "text/html")
    assert "sandbox" in headers["content-security-policy"].split("; ")
    assert headers["x-content-type-options"] == "nosniff"
    for path in ("/docs", "/metrics", "/ping", "/없음"):
        _, headers, _ = await world.call("GET", path)
        assert headers["x-content-type-options"] == "nosniff", path
        policy = headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(policy), path
