"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from engine.engine import Engine
from engine.settings import Settings

NewEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a long context whose greedy text does not end by itself."""
    from tests.engine.engines import make_talkative  # imports MXNet, which not all machines have

    return make_talkative(tmp_path_factory.mktemp("models") / "모델", max_length=4096)


@pytest.fixture
def new_engine() -> Iterator[NewEngine]:
    """Starts an engine with these models and settings, and closes it after the test."""
    with ExitStack() as engines:

        def start(models: Mapping[str, str | Path] = MappingProxyType({}), **given: Any) -> Engine:
            engine = Engine(Settings(**{"memory_mib": 64, **given}))
            engines.callback(engine.close)
            for name, folder in models.items():
                engine.load(name, str(folder))
            return engine

        yield start
