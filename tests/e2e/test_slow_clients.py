"""A thousand clients that send a byte a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.slow_clients import SlowClients, latencies, many_files
from tests.e2e.stores import serving, small

pytestmark = pytest.mark.slow

SLOW = 1000


def test_they_are_told_that_they_are_too_slow_and_the_others_answered(clean: Server) -> None:
    small(clean.store / "a")
    with many_files(SLOW), SlowClients(clean.port, SLOW) as slow:
        eventually(lambda: slow.open == SLOW)
        assert len(latencies(clean.url("/predictions/a"), 50)) == 50
        eventually(lambda: slow.refused >= SLOW)
        assert slow.answers == {b"HTTP/1.1 408 Request Timeout"}


def test_they_cannot_take_all_connections(tmp_path: Path) -> None:
    small(tmp_path / "store" / "a")
    with (
        serving(tmp_path / "run", tmp_path / "store", MAX_CONNECTIONS="100") as server,
        many_files(SLOW),
        SlowClients(server.port, 300) as slow,
    ):
        eventually(lambda: slow.refused >= 200)  # the oldest make room
        assert len(latencies(server.url("/predictions/a"), 20)) == 20
        gateway = server.descendants("serving.gateway")[0]
        inet = [c for c in gateway.net_connections("inet") if c.status == "ESTABLISHED"]
        assert len(inet) <= 101
