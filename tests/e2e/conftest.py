"""Real servers and small real models for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server on the demo models."""
    running = Server(tmp_path_factory.mktemp("server"), REPOSITORY / "model_store")
    try:
        yield running.wait_until_ready()
    finally:
        running.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A running server that the test may break."""
    running = Server(tmp_path, REPOSITORY / "model_store")
    try:
        yield running.wait_until_ready()
    finally:
        if running.process.poll() is None:
            running.stop()
