"""Errors of a client's call when a server does not answer as it should."""

from __future__ import annotations

import threading

import pytest

from scripts.client.errors import CallFailed
from scripts.client.targets import Call, Local
from tests.fleet.upstream import Handler, upstreams


def test_a_stream_that_stalls_is_a_timeout() -> None:
    """It was reported as an unreachable server: requests raises ConnectionError here."""
    over, begun = threading.Event(), "나는 오늘".encode()

    def stall(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(begun)
        handler.wfile.flush()
        over.wait()
        handler.drop()

    with upstreams(1) as [server]:
        server.act = stall
        target = Local(f"http://127.0.0.1:{server.port}", timeout_s=0.1)
        received = []
        try:
            with (
                pytest.raises(CallFailed, match=r"stopped in its answer for 0\.1 s") as failed,
                target.call(Call("시/봄", b"{}", stream=True)) as answer,
            ):
                received += answer.chunks
        finally:
            over.set()
    assert failed.value.kind == "timeout"
