"""Real servers and small real models for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import Shared


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server on the demo models."""
    with Server(tmp_path_factory.mktemp("server"), REPOSITORY / "model_store") as running:
        yield running


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("shared"))
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def clean(started: Shared) -> Server:
    """A running server of the fast backend, with gRPC, and with nothing in it, not even in
    `clean.store`, where the module puts its models. One server serves module after module."""
    return started.clean()


@pytest.fixture(scope="session")
def started_to_break(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("breakable"))
    yield shared
    shared.stop()


@pytest.fixture
def breakable(started_to_break: Shared) -> Server:
    """A server like `clean` for a single test, which may end it or any of its processes."""
    return started_to_break.clean()
