"""Which models stay loaded, in virtual time. Each takes 100 bytes unless a test says otherwise."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from common.errors import NeverFits, OutOfMemory
from serving.errors import DiskFull, Forbidden, InsufficientStorage, LoadCancelled, Unavailable
from serving.models.bases import Base
from serving.models.model import Model
from serving.models.model_settings import ModelSettings
from serving.store import StoredModel
from serving.tokens import Token, Usage, current
from tests.serving.fakes import START_S, Parts, stored

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """A server's parts with memory for three models, unless a test sets another budget."""
    return Parts(tmp_path, budget=300, names="abcdefgh")


async def use(parts: Parts, name: str, seconds: float = 0.0) -> None:
    async with parts.on_demand.use(name):
        await asyncio.sleep(seconds)


async def used(parts: Parts, *names: str) -> None:
    """Call models one after the other, so that the first has been idle for longest."""
    for name in names:
        await use(parts, name)
        await asyncio.sleep(1)


async def test_the_least_recently_used_models_go_and_no_more_than_are_needed(parts: Parts) -> None:
    parts.workers.budget = 500
    parts.workers.size["f"] = 250
    await used(parts, "a", "b", "c", "d", "e", "a")
    await use(parts, "f")
    assert parts.loaded() == ["a", "e", "f"]
    assert parts.workers.starts["f"] == 1  # not begun in vain


async def test_what_is_asked_for_often_stays_though_others_were_asked_for_later(
    parts: Parts,
) -> None:
    await used(parts, "a", "a", "a", "b", "c", "d")
    assert parts.loaded() == ["a", "c", "d"]


async def test_what_takes_long_to_load_stays(parts: Parts) -> None:
    await used(parts, "a", "b", "c")
    for name, load_s in (("a", 9.0), ("c", 0.1)):  # scripts
        model = parts.registry.get(name)
        model.in_engine, model.load_s = False, load_s
    await use(parts, "d")
    assert parts.loaded() == ["a", "b", "d"]


async def test_several_loads_make_room_at_once(parts: Parts) -> None:
    parts.workers.budget = 400
    await used(parts, "a", "b", "c", "d")
    parts.workers.end_s = 0.5
    parts.workers.size["g"] = 200
    began = asyncio.get_running_loop().time()
    await asyncio.gather(use(parts, "e"), use(parts, "g"))
    assert asyncio.get_running_loop().time() - began < 0.5 + START_S + 0.1
    assert parts.loaded() == ["d", "e", "g"]
    assert parts.workers.starts["e"] == parts.workers.starts["g"] == 1


async def test_what_was_unloaded_for_one_model_no_other_takes(parts: Parts) -> None:
    parts.workers.budget = 200
    await used(parts, "a", "b")
    parts.workers.size["c"] = 200
    busy = asyncio.create_task(use(parts, "a", 10))
    await asyncio.sleep(0.1)
    large = asyncio.create_task(use(parts, "c", 5))  # waits for a
    await asyncio.sleep(1)
    assert parts.loaded() == []
    small = asyncio.create_task(use(parts, "d"))
    await asyncio.gather(busy, large)
    assert not small.done()
    await small
    assert parts.workers.starts["c"] == parts.workers.starts["d"] == 1


async def test_a_model_that_will_not_fit_unloads_nothing(parts: Parts) -> None:
    parts.workers.budget = 500
    await used(parts, "b", "c")
    await parts.load("a", settings=ModelSettings(pinned=True))
    parts.workers.size["f"] = 450
    with pytest.raises(OutOfMemory):
        await use(parts, "f")
    parts.workers.size["f"] = 501
    with pytest.raises(NeverFits):
        await use(parts, "f")
    assert parts.loaded() == ["a", "b", "c"]


async def test_a_busy_model_goes_only_where_no_idle_one_will_do(parts: Parts) -> None:
    parts.workers.budget = 200
    await used(parts, "a", "b")
    busy = asyncio.create_task(use(parts, "a", 30))
    await asyncio.sleep(0.1)
    await use(parts, "c")
    assert parts.loaded() == ["a", "c"]
    other = asyncio.create_task(use(parts, "c", 10))
    await asyncio.sleep(0.1)
    await use(parts, "d")  # the one that was used first is drained
    assert busy.done()
    assert parts.loaded() == ["c", "d"]
    await other


async def test_what_has_just_been_loaded_serves_those_who_waited_for_it_first(parts: Parts) -> None:
    parts.workers.budget = 100
    asked = [asyncio.create_task(use(parts, name, 1)) for name in "abcabc"]
    await asyncio.gather(*asked)
    assert sum(parts.workers.starts.values()) <= 6


async def test_many_that_want_room_at_once_all_get_it(tmp_path: Path) -> None:
    names = [f"m{i}" for i in range(12)]
    parts = Parts(tmp_path, budget=300, names=names)
    await asyncio.gather(*(use(parts, name, 0.5) for name in names * 3))
    assert len(parts.loaded()) == 3
    assert sum(parts.workers.in_engine.values()) <= 300


async def test_two_that_wait_for_the_same_room_do_not_wait_for_each_other(parts: Parts) -> None:
    await parts.load("p", settings=ModelSettings(pinned=True))
    parts.workers.size.update({"a": 250, "b": 250})
    outcomes = await asyncio.gather(use(parts, "a"), use(parts, "b"), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OutOfMemory, OutOfMemory]
    assert asyncio.get_running_loop().time() < 5
    assert parts.loaded() == ["p"]


async def test_a_shortage_of_unknown_size_unloads_as_much_as_the_artifact_has(
    parts: Parts, tmp_path: Path
) -> None:
    parts.workers.budget = 1000
    await used(parts, "a", "b", "c", "d")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "model.params").write_bytes(bytes(150))
    parts.workers.errors["f"] = [
        InsufficientStorage("the worker has no memory left") for _ in range(9)
    ]
    with pytest.raises(InsufficientStorage):
        await use(parts, "f")
    assert parts.loaded() == ["c", "d"]
    assert not parts.registry.find("f")


async def test_room_that_another_load_takes_in_between_is_looked_for_again(parts: Parts) -> None:
    await used(parts, "a", "b")
    parts.workers.errors["d"] = [OutOfMemory("the engine's own, of no known size")]
    await use(parts, "d")
    assert parts.loaded() == ["a", "b", "d"]


@pytest.mark.parametrize(("settle_s", "listing_s"), [(0.5, 0), (0.1, 0.3)])
async def test_room_that_a_model_takes_which_is_just_becoming_ready_is_waited_for(
    parts: Parts, settle_s: float, listing_s: float
) -> None:
    parts.workers.budget = 200
    await parts.load("p", settings=ModelSettings(pinned=True))
    await used(parts, "a")
    parts.workers.settle_s, parts.workers.listing_s = settle_s, listing_s
    first = asyncio.create_task(use(parts, "b"))  # waits for a's room
    while not any(name.startswith("b#") for name in parts.workers.in_engine):
        await asyncio.sleep(0.01)
    await use(parts, "c")
    await first
    assert parts.loaded() == ["c", "p"]


async def test_a_full_cache_unloads_only_what_the_cache_holds(parts: Parts, tmp_path: Path) -> None:
    parts.workers.budget = 1000
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.params").write_bytes(bytes(100))
    await used(parts, "a")  # a folder of this machine, in place

    async def find(name: str) -> StoredModel:
        return dataclasses.replace(stored(name), url=f"s3://bucket/{name}", kind="archive")

    parts.on_demand._lookups.find = find  # type: ignore[method-assign]
    await used(parts, "b", "c")
    acquire = parts.cache.acquire

    def acquire_if_there_is_room(model: StoredModel, given_up: threading.Event) -> Any:
        if model.name == "d" and parts.cache.in_use["b"]:
            raise DiskFull("the cache is full", missing_bytes=80)
        return acquire(model, given_up)

    parts.cache.acquire = acquire_if_there_is_room  # type: ignore[method-assign]
    await use(parts, "d")
    assert parts.loaded() == ["a", "c", "d"]


@pytest.mark.parametrize("known", [True, False])
async def test_what_the_requests_of_others_hold_is_waited_for(parts: Parts, known: bool) -> None:
    await parts.load("p", settings=ModelSettings(pinned=True))
    busy = asyncio.create_task(use(parts, "p", 20))
    await asyncio.sleep(0.1)
    if known:
        parts.workers.in_engine["keys and values"] = 150
    else:  # the engine's own, of no known size
        parts.workers.errors["a"] = [OutOfMemory("no room") for _ in range(9)]
    waiting = asyncio.create_task(use(parts, "a"))
    await asyncio.sleep(10)
    assert not waiting.done()
    parts.workers.in_engine.pop("keys and values", None)
    parts.workers.errors.clear()
    await waiting
    assert not busy.done()
    assert parts.loaded() == ["a", "p"]
    busy.cancel()


async def test_a_load_that_has_no_room_within_its_time_may_be_tried_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path, budget=100, names="ab", load_timeout_s=30)
    busy = asyncio.create_task(use(parts, "a", 50))
    await asyncio.sleep(2)
    with pytest.raises(Unavailable, match="became free within 30 s: no room") as raised:
        await use(parts, "b")
    assert (raised.value.status, raised.value.retry_after_s) == (503, 1)
    await busy
    await use(parts, "b")


async def test_a_disk_without_room_of_which_no_more_is_known_is_507(parts: Parts) -> None:
    await used(parts, "a")

    def acquire(model: StoredModel, given_up: threading.Event) -> Any:
        raise DiskFull("the disk is full")

    parts.cache.acquire = acquire  # type: ignore[method-assign]
    with pytest.raises(DiskFull) as raised:
        await use(parts, "b")
    assert raised.value.status == 507
    assert parts.loaded() == ["a"]


async def test_a_load_that_waits_for_room_can_be_ended(parts: Parts) -> None:
    parts.workers.budget = 100
    busy = asyncio.create_task(use(parts, "a", 50))
    await asyncio.sleep(2)
    waiting = asyncio.create_task(use(parts, "b"))
    await asyncio.sleep(2)
    await parts.registry.unload("b")
    with pytest.raises(LoadCancelled):
        await waiting
    await busy
    await use(parts, "b")  # nothing is held any more


async def test_a_load_goes_on_though_its_request_has_ended(parts: Parts) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(use(parts, "a"), START_S / 2)
    await asyncio.sleep(START_S / 2)
    await asyncio.wait_for(use(parts, "a"), 0.01)
    assert parts.workers.starts["a"] == 1


async def test_a_model_is_unloaded_when_it_is_idle_and_comes_back_on_demand(parts: Parts) -> None:
    watch = asyncio.create_task(parts.evictor.watch())
    await parts.load("a", settings=ModelSettings(idle_unload_s=10))
    await parts.load("b", settings=ModelSettings(idle_unload_s=10, pinned=True))
    await use(parts, "a", 60)  # not while it is used
    assert parts.loaded() == ["a", "b"]
    await asyncio.sleep(8)
    assert parts.loaded() == ["a", "b"]
    await asyncio.sleep(4)
    assert parts.loaded() == ["b"]
    await use(parts, "a")
    assert parts.loaded() == ["a", "b"]
    watch.cancel()


async def test_a_model_has_as_many_connections_as_it_needs(parts: Parts) -> None:
    await used(parts, "a", "b", "a")
    assert parts.workers.connected == []  # one will do for one request after the other
    parts.registry.get("a").line.capacity = 16
    watching = asyncio.create_task(parts.evictor.watch())
    await asyncio.gather(*(use(parts, "a", 5) for _ in range(3)))
    assert parts.workers.connected == [("a", 16)]
    await asyncio.sleep(20)
    await asyncio.gather(use(parts, "a"), use(parts, "a"))
    for _ in range(28):  # one after the other
        await asyncio.sleep(1)
        await use(parts, "a")
    assert parts.workers.connected == [("a", 16)]
    await asyncio.sleep(3)
    assert parts.workers.connected == [("a", 16), ("a", 1)]
    watching.cancel()


async def test_who_finds_too_few_connections_asks_again(parts: Parts) -> None:
    await used(parts, "a")
    parts.registry.get("a").line.capacity = 16
    parts.workers.listing = Unavailable("Multi Model Server is being started")
    await asyncio.gather(use(parts, "a", 5), use(parts, "a", 5))
    parts.workers.listing = None
    await asyncio.gather(use(parts, "a", 5), use(parts, "a", 5))
    assert parts.workers.connected == [("a", 16)]


async def test_a_load_that_a_token_may_not_do_fails_for_that_token_only(parts: Parts) -> None:
    """All call at once and share loads: those of the team that may use the base get the model."""
    allowed = contextvars.ContextVar("allowed", default=True)

    async def find_base(model: Model) -> Base:
        await asyncio.sleep(1)
        if not allowed.get():
            raise Forbidden("가팀 may not use the base of this model")
        return Base()

    parts.registry._find_base = find_base

    async def call(team: str) -> None:
        current.set(Token(team, frozenset("a"), (), False, None, None, Usage()))
        allowed.set(team == "나팀")
        await use(parts, "a")

    calls = (call(team) for team in ("가팀", "나팀", "가팀", "나팀"))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Forbidden, type(None)] * 2
    assert parts.cache.discarded == []
