"""Models whose workers, engine or gateway have gone, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from common.errors import EngineUnavailable, OutOfMemory
from serving.errors import Unavailable, WorkerFailed
from serving.models.model import Model
from serving.models.model_settings import ModelSettings
from serving.models.recovery import MISSING_POLLS_IN_USE
from tests.serving.fakes import START_S, FakeWorkers, Parts
from tests.serving.models.test_registry import with_base

pytestmark = pytest.mark.virtual_time


@contextlib.asynccontextmanager
async def watched(parts: Parts) -> AsyncIterator[None]:
    watch = asyncio.create_task(parts.recovery.watch())
    try:
        yield
    finally:
        assert not watch.done(), "it has given up"
        watch.cancel()


async def until_restoring(model: Model) -> None:
    while not model.restoring:
        await asyncio.sleep(0.01)


async def test_a_lost_worker_for_which_requests_wait_comes_back_sooner(parts: Parts) -> None:
    model = await parts.load("봄")
    async with watched(parts):
        for lost in range(3):
            await asyncio.sleep(100)
            async with parts.registry.use("봄"):
                parts.workers.kill(model)
                await asyncio.sleep(START_S + 0.2)
                assert parts.workers.works(model)
                assert model.starts == lost + 2


async def test_where_the_engine_has_a_models_weights_is_known(parts: Parts) -> None:
    model = await parts.load("봄")
    async with watched(parts):
        parts.workers.residency = "parked"
        await asyncio.sleep(2)
        assert model.residency == "parked"
        parts.workers.in_engine.clear()
        await asyncio.sleep(2)
        assert model.residency == ""


async def test_whether_a_restarted_engine_shares_a_models_base_is_known(parts: Parts) -> None:
    with_base(parts)
    model = await parts.load("봄")
    async with watched(parts):
        parts.workers.whole_because = "its base: there is no such model folder"
        await asyncio.sleep(2)
        assert (model.whole_because, model.shared_base) == (parts.workers.whole_because, None)
        parts.workers.whole_because = ""
        await asyncio.sleep(2)
        assert (model.whole_because, model.shared_base) == ("", model.stored_base)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("Multi Model Server listed its models with ?"),
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("can't start new thread"),
    ],
)
async def test_a_poll_that_fails_ends_nothing(parts: Parts, error: Exception) -> None:
    model = await parts.load("봄")
    async with watched(parts), parts.registry.use("봄"):  # whose socket is polled, too
        parts.workers.listing = error
        await asyncio.sleep(3)
        parts.workers.kill(model)
        await asyncio.sleep(3)
        parts.workers.listing = None
        await asyncio.sleep(3)
        assert parts.workers.works(model)


async def test_an_engine_that_has_not_started_yet_is_no_warning_and_one_that_goes_is(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    gone = EngineUnavailable("the engine does not answer")
    parts.recovery.adopted.clear()
    parts.workers.listing = gone
    async with watched(parts):
        await asyncio.sleep(3)
        parts.workers.listing = None
        await parts.recovery.adopt()
        await asyncio.sleep(3)
        assert not caplog.records
        parts.workers.listing = gone
        await asyncio.sleep(3)
    assert caplog.messages == ["the models' workers cannot be polled: the engine does not answer"]


async def test_an_unexpected_error_is_not_swallowed(parts: Parts) -> None:
    parts.workers.listing = KeyError("models")
    with pytest.raises(KeyError):
        await parts.recovery.watch()


async def test_a_model_that_cannot_come_back_backs_off_and_says_so(parts: Parts) -> None:
    model = await parts.load("a")
    parts.workers.errors["a"] = [WorkerFailed("the script fails") for _ in range(100)]
    times = []
    async with watched(parts):
        parts.workers.kill(model)
        for _ in range(10):
            await until_restoring(model)
            times.append(asyncio.get_running_loop().time())
            await model.change()
        waits = [b - a - START_S for a, b in itertools.pairwise(times)]
        for wait_s, least_s in zip(waits, (1, 2, 4, 8, 16, 32, 60, 60, 60), strict=True):
            assert least_s - 0.02 <= wait_s <= least_s + 2  # it looks once a second
        assert model.restarts.reason == "the script fails"
        assert not parts.workers.turn.locked()
        # Others are loaded and restarted meanwhile.
        other = await parts.load("b")
        parts.workers.kill(other)
        await asyncio.sleep(3)
        assert parts.workers.works(other)
        with pytest.raises(Unavailable) as refused:  # at once, and truly
            await parts.recovery.wait_for(model, 60)
        assert 2 < (refused.value.retry_after_s or 0) <= 60
        parts.workers.errors.clear()
        await asyncio.sleep(65)
        assert parts.workers.works(model)
        assert not model.restarts.reason


async def test_a_worker_that_dies_again_and_again_backs_off_too(parts: Parts) -> None:
    model = await parts.load("a")
    async with watched(parts):
        for _ in range(300):
            if parts.workers.works(model) and not model.restoring:
                parts.workers.kill(model)
            await asyncio.sleep(1)
        assert parts.workers.starts["a"] < 12
        await asyncio.sleep(200)  # and is forgiven when it stays
        starts = parts.workers.starts["a"]
        parts.workers.kill(model)
        await asyncio.sleep(3)
        assert parts.workers.starts["a"] == starts + 1


async def test_what_dies_with_mms_or_the_engine_comes_back_at_once_however_often(
    parts: Parts,
) -> None:
    models = [await parts.load(name) for name in ("봄", "여름")]
    async with watched(parts):
        for _ in range(6):
            parts.workers.restart_mms()
            await asyncio.sleep(3)
            assert all(map(parts.workers.works, models))
            parts.workers.in_engine.clear()
            await asyncio.sleep(6)
            assert len(parts.workers.in_engine) == 2
        parts.workers.kill(models[0])  # and its own death is not its second
        await asyncio.sleep(3)
        assert parts.workers.works(models[0])


async def test_a_restart_while_mms_is_away_is_not_the_models_fault(parts: Parts) -> None:
    model = await parts.load("a")
    parts.workers.errors["a"] = [Unavailable("being started") for _ in range(5)]
    async with watched(parts):
        parts.workers.kill(model)
        await asyncio.sleep(1)
        await parts.recovery.wait_for(model, 60)  # a request is answered after all
        assert parts.workers.works(model)


async def test_what_was_seen_before_a_worker_was_started_again_does_not_end_it(
    parts: Parts,
) -> None:
    first = await parts.load("a")
    async with watched(parts):
        del parts.workers.running[first.id]
        parts.workers.slow = asyncio.Event()  # a listing that lacks it, and takes its time
        await asyncio.sleep(2)
        loaded = await parts.load("b")
        parts.workers.running[first.id] = first
        first.starts += 1  # back, in another way
        parts.workers.slow.set()
        await asyncio.sleep(0.5)
        assert not first.restoring
        assert not loaded.restoring
        await asyncio.sleep(5)
    assert (parts.workers.starts["a"], parts.workers.starts["b"]) == (1, 1)


async def test_a_gateway_that_dies_twice_finds_its_models_healthy(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    model = await parts.load("a", settings=ModelSettings(pinned=True, queue=3))
    async with watched(parts):
        parts.workers.kill(model)
        await asyncio.sleep(3)
    second = Parts(tmp_path)
    second.workers.running = parts.workers.running
    second.workers.in_engine = parts.workers.in_engine
    await second.recovery.adopt()
    assert second.registry.get("a").settings == ModelSettings(pinned=True, queue=3)
    async with watched(second):
        await asyncio.sleep(10)
    assert second.workers.unregistered == []
    assert second.workers.starts["a"] == 0


async def test_workers_that_belong_to_no_model_are_ended(parts: Parts) -> None:
    model = await parts.load("a")
    parts.workers.running["stranger"] = model
    async with watched(parts):
        await asyncio.sleep(2)
    assert parts.workers.unregistered == ["stranger"]


async def test_nobody_waits_for_the_end_of_a_worker_that_is_still_starting(tmp_path: Path) -> None:
    first = Parts(tmp_path)
    model = await first.load("봄")
    second = Parts(tmp_path)
    second.workers.running = {**first.workers.running, "stranger": model}
    second.workers.in_engine = first.workers.in_engine
    second.workers.starting.add("stranger")
    before = asyncio.get_running_loop().time()
    await second.recovery.adopt()
    assert asyncio.get_running_loop().time() == before
    async with watched(second):
        second.workers.kill(second.registry.get("봄"))
        await asyncio.sleep(2)
    assert second.workers.starts["봄"] == 1
    assert second.workers.unregistered.count("stranger") == 1


@pytest.mark.parametrize("unloaded", [True, False])
async def test_a_restart_that_hangs_ends_with_an_unload_or_at_the_loads_limit(
    tmp_path: Path, unloaded: bool
) -> None:
    parts = Parts(tmp_path, load_timeout_s=30)
    model = await parts.load("a")
    async with watched(parts):
        parts.workers.hung.add("a")
        parts.workers.kill(model)
        await until_restoring(model)
        if unloaded:
            before = asyncio.get_running_loop().time()
            await parts.registry.unload("a")
            assert asyncio.get_running_loop().time() == before
            assert (parts.registry.all(), parts.workers.running) == ([], {})
            await asyncio.gather(parts.load("b"), parts.load("c"))  # no slot is held
        else:
            await asyncio.sleep(31)
            assert not model.restoring
            assert "LOAD_TIMEOUT_S" in model.restarts.reason


LOSSES: dict[str, Callable[[FakeWorkers, Model], None]] = {
    "its worker ends": FakeWorkers.kill,
    "MMS ends": lambda workers, model: workers.restart_mms(),
    "the engine ends": lambda workers, model: workers.in_engine.clear(),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
async def test_a_model_lost_during_its_unload_comes_back_only_for_requests_in_flight(
    parts: Parts, lose: Callable[[FakeWorkers, Model], None]
) -> None:
    model, workers = await parts.load("봄"), parts.workers
    async with watched(parts):
        async with parts.registry.use("봄"):
            unload = asyncio.create_task(parts.registry.unload("봄"))
            await asyncio.sleep(0.1)
            lose(workers, model)
            await asyncio.sleep(MISSING_POLLS_IN_USE + 5)
            assert workers.works(model)
            assert list(workers.in_engine) == [model.engine_name]
            assert not unload.done()
        workers.end_s = 10
        await asyncio.sleep(1)
        lose(workers, model)
        await unload
        await asyncio.sleep(10)
    assert workers.starts["봄"] == 2
    assert (parts.registry.all(), workers.running, workers.in_engine) == ([], {}, {})
    await parts.load("봄")


@pytest.mark.parametrize("pinned", [False, True])
async def test_a_model_whose_room_others_have_taken_is_unloaded(parts: Parts, pinned: bool) -> None:
    model = await parts.load("a", settings=ModelSettings(pinned=pinned))
    parts.workers.errors["a"] = [OutOfMemory("no room")]
    async with watched(parts):
        parts.workers.kill(model)
        await asyncio.sleep(10)
        assert parts.loaded() == (["a"] if pinned else [])


async def test_a_list_of_models_that_cannot_be_read_is_none(parts: Parts, tmp_path: Path) -> None:
    for text in ("{", "7", "[1]", '[{"stored": {}}]', '[{"name": "a"}]'):
        (tmp_path / "models.json").write_text(text)
        await parts.recovery.adopt()
    assert parts.registry.all() == []
