"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from engine.engine import Engine
from engine.settings import Settings

NewEngine = Callable[..., Engine]


@pytest.fixture
def new_engine() -> Iterator[NewEngine]:
    """Starts an engine with the given settings, and closes it after the test."""
    with ExitStack() as engines:

        def start(**settings: Any) -> Engine:
            engine = Engine(Settings(**settings))
            engines.callback(engine.close)
            return engine

        yield start
