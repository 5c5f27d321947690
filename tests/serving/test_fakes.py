"""The fakes of our own classes do as those do: each method is one of theirs, loads are promised
memory in the same order, and a fetched model has a folder."""

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
from serving.process.signals import StopSignals
from serving.process.system import Processes
from serving.store import Cache, Fetched, Lookups, Stop, StoredModel, open_store
from serving.store.folder import FolderStore
from tests.serving import fakes
from tests.serving.api import gateways
from tests.serving.console import test_feed
from tests.serving.mms import test_workers
from tests.serving.models import test_fetches
from tests.serving.process import test_supervisor
from tests.serving.store import test_lookups
from tests.serving.store.s3 import archive, open_cache

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
    (
        test_supervisor.FakeProcesses,
        (Processes, StopSignals),
        {"at", "end", "starts", "count", "stop"},
    ),
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


def fake_cache(folder: Path) -> tuple[Any, StoredModel]:
    return fakes.FakeCache(folder), fakes.stored("봄")


def real_cache(folder: Path) -> tuple[Any, StoredModel]:
    (folder / "store").mkdir()
    (folder / "store" / "봄.tar.gz").write_bytes(archive({"a.params": b"x"}))
    location = str(folder / "store")
    return open_cache(folder / "cache", location=location), open_store(location).find("봄")


@pytest.mark.parametrize("make", [fake_cache, real_cache])
def test_a_model_that_is_acquired_has_one_folder(tmp_path: Path, make: Any) -> None:
    cache, model = make(tmp_path)
    first, second = (cache.acquire(model, Stop()) for _ in range(2))
    assert first.path == second.path
    cache.release(first.path, discard=True)
    assert second.path.is_dir()  # it is still in use
    cache.release(second.path, discard=True)
    again = cache.acquire(model, Stop())
    assert again.path == first.path
    assert again.path.is_dir()
