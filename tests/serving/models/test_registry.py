"""The life of each model, in virtual time."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from common.errors import ArtifactError, NeverFits
from serving.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    LoadCancelled,
    ModelNotFound,
    ModelNotInStore,
    Timeout,
    WorkerLost,
)
from serving.models.bases import Base
from serving.models.model import LoadRequest, Model, State
from serving.models.model_settings import ModelSettings
from serving.models.registry import Step
from serving.store import Fetched, StoredModel
from tests.serving.fakes import Parts, stored

pytestmark = pytest.mark.virtual_time


async def until_hung(parts: Parts, name: str) -> None:
    while not parts.workers.starts[name]:
        await asyncio.sleep(0.1)
    await asyncio.sleep(5)


async def test_a_failed_load_frees_the_name_and_leaves_nothing(
    parts: Parts, tmp_path: Path
) -> None:
    settings = tmp_path / "a" / "serving.json"
    settings.parent.mkdir()
    settings.write_text('{"온도": 1}')
    with pytest.raises(BadRequest, match=r"serving.json: 온도 is not known; known are backend"):
        await parts.load("a")
    assert (parts.registry.all(), parts.workers.starts["a"]) == ([], 0)
    settings.unlink()
    parts.workers.errors["a"] = [ArtifactError("the folder holds no model")]
    with pytest.raises(ArtifactError, match=r"^the folder holds no model$"):
        await parts.load("a")
    assert (parts.registry.all(), parts.workers.running) == ([], {})
    assert parts.cache.in_use["a"] == 0
    assert parts.cache.discarded == ["a", "a"]  # the next fetch may bring another
    await parts.load("a")
    assert parts.loaded() == ["a"]


async def test_a_worker_that_is_lost_at_its_start_is_started_again_under_another_id(
    parts: Parts,
) -> None:
    parts.workers.errors["봄"] = [WorkerLost("it ended at once")]
    model = await parts.load("봄")
    assert list(parts.workers.running) == [model.id]
    assert model.id.endswith("-2")
    assert list(parts.workers.in_engine) == [model.engine_name]
    parts.workers.errors["시"] = [WorkerLost("it ended at once") for _ in range(9)]
    with pytest.raises(WorkerLost):
        await parts.load("시")
    assert parts.loaded() == ["봄"]
    assert not parts.workers.promised


async def test_a_load_that_hangs_ends_at_its_limit(tmp_path: Path) -> None:
    parts = Parts(tmp_path, load_timeout_s=300)
    parts.workers.hung.add("a")
    loop = asyncio.get_running_loop()
    with pytest.raises(Timeout, match="within 300 s"):
        await parts.load("a")
    assert loop.time() == pytest.approx(300)
    assert (parts.registry.all(), parts.workers.running) == ([], {})


async def test_an_unload_ends_a_load_whose_worker_hangs(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    parts.workers.hung.add("a")
    load = asyncio.create_task(parts.load("a"))
    await until_hung(parts, "a")
    before = asyncio.get_running_loop().time()
    await parts.registry.unload("a")
    assert asyncio.get_running_loop().time() == before
    with pytest.raises(LoadCancelled, match="unloaded while"):
        await load
    assert (parts.registry.all(), parts.workers.running) == ([], {})
    assert (parts.cache.in_use["a"], parts.cache.discarded) == (0, [])
    assert (parts.journal.failed, [*parts.journal.entries]) == ({}, [])  # called off, not failed
    parts.workers.hung.clear()
    await parts.load("a")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_loads_that_hang_in_the_store_hold_up_no_unload_and_are_ended_by_their_own(
    parts: Parts,
) -> None:
    await parts.load("b")
    for name in "cdef":
        parts.cache.hang(name)
    loads = [asyncio.create_task(parts.load(name)) for name in "cdef"]
    await asyncio.sleep(1)
    await parts.registry.unload("b")
    assert {model.state for model in parts.registry.all()} == {State.FETCHING}
    for name in "cdef":
        await parts.registry.unload(name)
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {LoadCancelled}
    assert parts.registry.all() == []
    for name in "cdef":
        parts.cache.let_go(name)  # its thread ends later, and gives back what it fetched
    await asyncio.sleep(1)
    assert parts.cache.in_use == dict.fromkeys("bcdef", 0)


async def test_an_unload_waits_for_requests_in_flight_and_takes_no_new_ones(parts: Parts) -> None:
    model = await parts.load("a")
    async with parts.registry.use("a"):
        unload = asyncio.create_task(parts.registry.unload("a"))
        await asyncio.sleep(1)
        assert model.state is State.DRAINING
        with pytest.raises(ModelNotFound):
            parts.registry.get("a")
        assert parts.workers.running
    await unload
    assert not parts.workers.running


async def test_an_unload_whose_requests_hang_ends_at_their_limit(tmp_path: Path) -> None:
    parts = Parts(tmp_path, request_timeout_s=60)
    await parts.load("a")
    async with parts.registry.use("a"):
        await parts.registry.unload("a")
    assert asyncio.get_running_loop().time() < 90
    assert parts.registry.all() == []


async def test_a_name_is_free_even_if_cleaning_up_goes_wrong(parts: Parts) -> None:
    await parts.load("a")

    def broken(path: Path, discard: bool = False) -> None:
        raise OSError("disk")

    parts.cache.release = broken  # type: ignore[method-assign]
    await parts.registry.unload("a")
    assert parts.registry.all() == []


async def test_adopting_overwrites_nothing(parts: Parts) -> None:
    old = Model("a", "a", "old-1", stored("a"), {"response_timeout": 60})
    parts.cache.hang("a")
    adopting = asyncio.create_task(parts.registry.adopt(old))
    await asyncio.sleep(1)
    with pytest.raises(Conflict):  # while the artifact is looked for
        await parts.load("a")
    parts.cache.let_go("a")
    await adopting
    with pytest.raises(Conflict):
        await parts.registry.adopt(Model("a", "a", "old-2", stored("a"), {}))
    assert parts.registry.get("a") is old


async def test_an_adapter_whose_base_is_gone_is_not_adopted_and_may_be_evicted(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = parts.cache.acquire

    def without_base(model: StoredModel, given_up: threading.Event) -> Fetched:
        if model.name == "소월":
            raise ModelNotInStore("there is no model 소월")
        return acquire(model, given_up)

    monkeypatch.setattr(parts.cache, "acquire", without_base)
    old = Model("봄", "봄", "old-1", stored("봄"), {}, stored_base=stored("소월"))
    with pytest.raises(ModelNotInStore):
        await parts.registry.adopt(old)
    assert parts.registry.all() == []
    assert parts.cache.in_use == {"봄": 0}


def with_base(parts: Parts, **found: Any) -> None:
    """The registry finds 소월 as the base of any model."""

    async def find_base(model: Model) -> Base:
        return Base(stored("소월"), **found)

    parts.registry._find_base = find_base


async def test_a_model_whose_base_cannot_be_fetched_is_whole_unless_it_needs_it(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = parts.cache.acquire

    def without_base(model: StoredModel, given_up: threading.Event) -> Fetched:
        if model.name == "소월":
            raise DiskFull("no disk is left", missing_bytes=100)
        return acquire(model, given_up)

    async def evict(model: Model, step: Step) -> None:
        nonlocal evicted
        try:
            await step()
        except DiskFull:
            evicted += 1
            raise

    monkeypatch.setattr(parts.cache, "acquire", without_base)
    with_base(parts)
    evicted = 0
    model = await parts.load("봄", attempt=evict)
    assert (model.whole_because, model.shared_base, model.base) == (
        "its base cannot be fetched", None, None,
    )  # fmt: skip
    assert evicted == 0
    with pytest.raises(DiskFull):
        await parts.load("여름", settings=ModelSettings(base="소월"), attempt=evict)
    with_base(parts, is_adapter=True)
    with pytest.raises(DiskFull):
        await parts.load("여름", attempt=evict)
    assert evicted == 2
    assert (parts.loaded(), parts.cache.in_use) == (["봄"], {"봄": 1, "여름": 0})


async def test_a_model_that_does_not_fit_beside_its_base_is_whole_unless_it_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path, budget=150)

    def bytes_of(model: Model) -> int:
        return 100 if model.base is None else 170

    monkeypatch.setattr(parts.workers, "bytes_of", bytes_of)
    with_base(parts)
    with pytest.raises(NeverFits):
        await parts.load("봄", settings=ModelSettings(base="소월"))
    model = await parts.load("봄")
    assert (model.whole_because, model.shared_base) == (
        "memory has no room for its base, too", None,
    )  # fmt: skip
    assert parts.cache.in_use == {"봄": 1, "소월": 0}
    assert parts.workers.starts == {"봄": 1}
    (kept,) = parts.snapshot.read()[0]
    assert kept.whole_because == model.whole_because


async def test_a_model_whose_base_the_engine_refuses_is_whole_unless_it_needs_it(
    parts: Parts,
) -> None:
    with_base(parts)
    wrong = ArtifactError("its base: the folder holds an adapter")
    parts.workers.errors["봄"] = [wrong]
    model = await parts.load("봄")
    assert (model.whole_because, model.base) == ("its base cannot be used", None)
    parts.workers.errors["여름"] = [ArtifactError("여름 has no weights") for _ in range(2)]
    with pytest.raises(ArtifactError, match="여름 has no weights"):
        await parts.load("여름")
    parts.workers.errors["여름"] = [wrong]
    with pytest.raises(ArtifactError, match="its base: the folder holds an adapter"):
        await parts.load("여름", settings=ModelSettings(base="소월"))
    assert parts.cache.in_use == {"봄": 1, "소월": 0, "여름": 0}


async def test_a_version_in_place_of_another_keeps_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path, budget=150)
    with_base(parts)
    old = await parts.load("봄")
    model = await parts.registry.replace(old, stored("봄"))
    assert (model.shared_base, model.whole_because) == (stored("소월"), "")
    assert parts.cache.in_use == {"봄": 1, "소월": 1}


async def test_a_new_gateway_knows_which_models_share_a_base(parts: Parts) -> None:
    with_base(parts, is_adapter=True)
    await parts.load("어댑터")
    with_base(parts)
    whole = await parts.load("델타")
    whole.whole_because = "they have nothing in common"
    await parts.registry.save()
    delta, adapter = parts.snapshot.read()[0]
    assert (adapter.is_adapter, adapter.shared_base) == (True, stored("소월"))
    adapter.whole_because = "it is merged"
    assert adapter.shared_base == stored("소월")
    assert (delta.is_adapter, delta.shared_base, delta.stored_base) == (False, None, stored("소월"))
    assert delta.whole_because == whole.whole_because


async def test_a_full_disk_fails_nothing_that_is_loaded(parts: Parts, tmp_path: Path) -> None:
    await parts.load("a")
    (tmp_path / "models.new").mkdir()  # nothing can be written there now
    await parts.load("b")
    await parts.registry.unload("a")
    assert parts.loaded() == ["b"]
    assert [model.name for model in parts.snapshot.read()[0]] == ["a"]
    (tmp_path / "models.new").rmdir()
    watch = asyncio.create_task(parts.recovery.watch())
    await asyncio.sleep(2)  # tried again
    assert [model.name for model in parts.snapshot.read()[0]] == ["b"]
    watch.cancel()


async def test_a_models_file_of_settings_is_read_and_a_requests_own_beat_it(
    parts: Parts, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    said = {"pinned": True, "timeout_s": 2.5, "max_rows": 4, "queue": 0}
    (tmp_path / "a" / "serving.json").write_text(json.dumps(said))
    model = await parts.load("a", settings=ModelSettings(timeout_s=9))
    assert model.settings == ModelSettings(pinned=True, timeout_s=9, max_rows=4, queue=0)
    assert (model.request_timeout_s, model.line.max_waiting) == (9, 0)
    (snapshot,) = parts.snapshot.read()[0]
    assert snapshot.settings == model.settings


async def test_a_new_version_that_does_not_load_leaves_the_old_one_answering(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path, names=["시"])
    await parts.on_demand.refresh("시", evict=True)
    old = parts.registry.get("시")
    parts.lookups.versions["시"] += 1
    parts.workers.errors["시"] = [ArtifactError("a broken file")]
    refresh = asyncio.create_task(parts.on_demand.refresh("시", evict=True))
    await asyncio.sleep(0.5)
    assert len(parts.registry.all()) == 2
    async with parts.registry.use("시") as model:
        assert model is old
    with pytest.raises(ArtifactError):
        await refresh
    assert (parts.registry.all(), list(parts.workers.running)) == ([old], [old.id])
    await parts.on_demand.refresh("시", evict=True)
    await old.change()
    assert [model.stored.version for model in parts.registry.all()] == ["2"]
    assert parts.workers.running.keys() == {parts.registry.get("시").id}


async def test_concurrent_loads_of_a_changed_model_share_one(tmp_path: Path) -> None:
    parts = Parts(tmp_path, names=["시"])
    await parts.on_demand.refresh("시", evict=True)
    parts.lookups.versions["시"] += 1
    async with parts.registry.use("시"):  # it drains after the new one is ready
        await asyncio.gather(*(parts.on_demand.refresh("시", evict=True) for _ in range(4)))
        assert parts.registry.get("시").stored.version == "2"
    assert parts.workers.starts["시"] == 2


async def test_where_memory_has_room_for_one_version_the_old_one_ends_before_the_new_one_starts(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path, budget=150, names=["시"])
    for evict in (True, False):
        await parts.on_demand.refresh("시", evict=True)
        parts.lookups.versions["시"] += 1
        refresh = asyncio.create_task(parts.on_demand.refresh("시", evict=evict))
        await asyncio.sleep(0.5)
        async with parts.on_demand.use("시") as model:  # waits for the new one
            assert model.stored.version == str(1 + parts.lookups.versions["시"])
        await refresh
        assert parts.loaded() == ["시"]


async def test_an_unload_during_a_replacement_ends_both_versions(tmp_path: Path) -> None:
    parts = Parts(tmp_path, names=["시"])
    await parts.on_demand.refresh("시", evict=True)
    parts.lookups.versions["시"] += 1
    refresh = asyncio.create_task(parts.on_demand.refresh("시", evict=True))
    await asyncio.sleep(0.5)
    await parts.registry.unload("시")
    with pytest.raises(LoadCancelled):
        await refresh
    assert (parts.registry.all(), parts.workers.running) == ([], {})


async def test_settings_of_a_load_request_outlive_eviction_new_versions_and_the_gateway(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path, budget=150, names=["시", "봄"])
    settings = ModelSettings(precision="fp32", queue=3)
    request = LoadRequest("시", settings, {"initial_workers": 2})
    await asyncio.shield(parts.registry.load("내 시", request, stored("시")))
    async with parts.on_demand.use("봄"):
        assert parts.loaded() == ["봄"]
    async with parts.on_demand.use("내 시") as model:
        assert (model.settings, model.options["initial_workers"]) == (settings, 2)
    parts.lookups.versions["시"] += 1
    await parts.on_demand.refresh("내 시", evict=True)
    model = parts.registry.get("내 시")
    assert (model.settings, model.stored.version) == (settings, "2")
    async with parts.on_demand.use("봄"):
        pass
    assert parts.snapshot.read()[1] == {"내 시": request}
    # A request that unloads the model ends that, even while it is not loaded.
    await parts.registry.unload("내 시")
    with pytest.raises(ModelNotInStore):
        await parts.on_demand.ensure("내 시")
    with pytest.raises(ModelNotFound):
        await parts.registry.unload("내 시")
