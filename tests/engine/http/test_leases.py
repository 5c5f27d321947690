"""How long a leased model stays loaded, with a real engine and no clock."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelNotFound
from engine.engine import Engine
from engine.http.leases import Leases
from tests.engine.conftest import NewEngine
from tests.engine.engines import WAIT_S, Gate, Request

NAME = "소월"
NEVER_S = 1e6


@pytest.fixture
def engine(model_dir: Path, new_engine: NewEngine) -> Engine:
    return new_engine({NAME: model_dir})


async def finished(leases: Leases) -> None:
    """Waits for the unloads that were to come."""
    await asyncio.gather(*leases._unloads.values(), return_exceptions=True)


async def test_a_model_goes_after_its_last_lease(engine: Engine) -> None:
    leases = Leases(engine, asyncio.Event(), grace_s=0)
    leases.take(NAME)
    leases.take(NAME)
    leases.release(NAME)
    await finished(leases)
    assert engine.models()
    leases.release(NAME)
    await finished(leases)
    assert not engine.models()
    assert not leases._unloads


async def test_a_new_lease_calls_the_unload_off(engine: Engine) -> None:
    leases = Leases(engine, asyncio.Event(), grace_s=NEVER_S)
    leases.take(NAME)
    leases.release(NAME)
    unload = leases._unloads[NAME]
    leases.take(NAME)
    await asyncio.wait([unload])
    assert unload.cancelled()
    await asyncio.sleep(0)
    assert not leases._unloads


async def test_a_lease_whose_load_failed_unloads_no_model_that_had_none(engine: Engine) -> None:
    leases = Leases(engine, asyncio.Event(), grace_s=0)
    leases.take(NAME)
    leases.release(NAME, loaded=False)
    await finished(leases)
    assert engine.models()
    leases.take(NAME)
    leases.take(NAME)
    leases.release(NAME)
    leases.release(NAME, loaded=False)  # the other lease kept the model loaded
    await finished(leases)
    assert not engine.models()
    assert not leases._held


async def test_a_lease_taken_while_the_unload_begins_keeps_the_model(
    engine: Engine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, unload = Gate(), engine.unload
    monkeypatch.setattr(engine, "unload", lambda *a, **options: gate() and unload(*a, **options))
    leases = Leases(engine, asyncio.Event(), grace_s=0)
    leases.take(NAME)
    leases.release(NAME)
    await asyncio.to_thread(gate.reached)
    leases.take(NAME)
    model = engine.load(NAME, str(model_dir))
    gate.open()
    await finished(leases)
    assert engine.describe(model)["name"] == NAME


async def test_without_a_lease_requests_are_finished(engine: Engine) -> None:
    """As a stream goes on whose worker's process was killed."""
    tried, unload = threading.Event(), engine.unload

    def counted(*args: Any, **options: Any) -> bool:
        gone = unload(*args, **options)
        tried.set()
        return gone

    engine.unload = counted  # type: ignore[method-assign]
    leases = Leases(engine, asyncio.Event(), grace_s=0)
    leases.take(NAME)
    # Its first token comes only after the first try to unload the model.
    request = Request(engine, NAME, "봄", lambda _: tried.wait(WAIT_S), max_new_tokens=20)
    leases.release(NAME)
    await asyncio.to_thread(request.wait)
    assert (len(request.tokens), request.error) == (20, None)
    await finished(leases)
    assert not engine.models()


async def test_while_the_engine_stops_its_models_outlive_their_leases(engine: Engine) -> None:
    stopping = asyncio.Event()
    leases = Leases(engine, stopping, grace_s=0)
    leases.take(NAME)
    leases.take("other")
    leases.release(NAME)  # its worker stops first
    stopping.set()
    leases.release("other")
    await finished(leases)
    assert engine.models()  # for the requests that are still running


def test_statistics_describe_no_model_that_is_being_freed(
    engine: Engine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing begins with the engine's lock, which those that describe a model hold."""
    model = engine.load(NAME, str(model_dir))
    free_to_go: list[bool] = []

    def kv_bytes(batch: Any, of: Any = None) -> int:
        with ThreadPoolExecutor(1) as pool:
            free_to_go.append(pool.submit(engine._changed.acquire, blocking=False).result(WAIT_S))
        return 0

    monkeypatch.setattr(type(model.batch), "kv_bytes", kv_bytes)
    engine.statistics()
    engine.describe(model)
    assert free_to_go == [False, False]
    engine.unload(NAME)
    with pytest.raises(ModelNotFound):
        engine.describe(model)
    assert engine.statistics()["models"] == []
