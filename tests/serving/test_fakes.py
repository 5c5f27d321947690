"""The fakes of our own classes do as those do: each method is one of theirs, and loads are promised
memory in the same order."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from common.errors import OutOfMemory
from engine.http.async_client import AsyncEngineClient
from serving.mms.client import MMSClient
from serving.mms.workers import Workers
from serving.models.model import Model
from serving.process.system import Processes
from serving.store import Cache, Fetched, Lookups
from serving.store.folder import FolderStore
from tests.serving import fakes
from tests.serving.api import gateways
from tests.serving.console import test_feed
from tests.serving.mms import test_workers
from tests.serving.models import test_fetches
from tests.serving.process import test_supervisor
from tests.serving.store import test_lookups

# With what a test may do to it.
PAIRS: list[tuple[type, tuple[type, ...], set[str]]] = [
    (fakes.FakeWorkers, (Workers,), {"bytes_of", "works", "kill", "restart_mms"}),
    (fakes.FakeCache, (Cache,), {"hang", "let_go"}),
    (fakes.FakeLookups, (Lookups,), set()),
    (gateways.FakeMMS, (MMSClient,), {"answer"}),
    (gateways.FakeEngine, (AsyncEngineClient,), set()),
    (test_workers.FakeMMS, (MMSClient,), set()),
    (test_workers.FakeEngine, (AsyncEngineClient,), set()),
    (test_feed.CountingEngine, (AsyncEngineClient,), set()),
    (test_lookups.CountingStore, (FolderStore,), set()),
    (test_fetches.HangingCache, (Cache,), set()),
    (test_supervisor.FakeProcesses, (Processes,), {"at", "end", "starts", "count", "stop"}),
]


@pytest.mark.parametrize(
    ("fake", "real", "own"), PAIRS, ids=[f"{f.__module__}.{f.__name__}" for f, *_ in PAIRS]
)
def test_a_fake_has_no_method_that_the_real_one_lacks(
    fake: type, real: tuple[type, ...], own: set[str]
) -> None:
    for name, method in inspect.getmembers(fake, inspect.isfunction):
        if name.startswith("_") or name in own:
            continue
        theirs = next((getattr(cls, name) for cls in real if hasattr(cls, name)), None)
        assert theirs is not None, name
        assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(theirs), name
        known = list(inspect.signature(theirs).parameters)
        for parameter in inspect.signature(method).parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                assert parameter.name in known or parameter.default is parameter.empty, name


class BudgetEngine(test_workers.FakeEngine):
    """Has 250 bytes, of which each model takes 100."""

    async def check(self, *given: Any) -> int:
        *_, promised, _ = given
        free = 250 - sum(promised.values())
        if free < 100:
            raise OutOfMemory("no room", missing_bytes=100 - free, needed_bytes=100)
        return 100


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "make",
    [
        lambda folder: test_workers.Parts(folder, BudgetEngine()).workers,
        lambda _: fakes.FakeWorkers(budget=250),
    ],
)
async def test_memory_is_promised_to_loads_in_their_order_until_they_end(
    tmp_path: Path, make: Any
) -> None:
    workers, models = make(tmp_path), []
    for name in ("봄", "여름", "가을"):
        (tmp_path / name).mkdir()
        model = Model(name, name, f"{name}-0-1", fakes.stored(name), {"response_timeout": 60})
        model.fetched = Fetched(tmp_path / name, hit=True)
        models.append(model)
    first, second, third = models
    for model in (first, second):
        assert await workers.check(model)
        assert workers.promised_bytes(model) == 100
    with pytest.raises(OutOfMemory) as raised:
        await workers.check(third)
    assert raised.value.missing_bytes == 50
    assert workers.promised_bytes(third) == 100  # it waits for its turn
    assert await workers.check(first)
    await workers.end(first)
    assert workers.promised_bytes(first) == 0
    assert await workers.check(third)
    await workers.start(second)
    assert workers.promised_bytes(second) == 0
