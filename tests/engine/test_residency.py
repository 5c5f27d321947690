"""More models are loaded than fit into memory, and all of them answer as if they were alone."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import ArtifactError, Cancelled, EngineError, OutOfMemory
from common.memory import Memory
from engine import residency
from engine.artifacts.config import GPT2Config
from engine.budget import Budget
from engine.engine import Engine
from engine.model import Core
from engine.prefixes import Prefixes
from engine.residency import Residency
from engine.sandbox.reading import Reading
from engine.scheduler import Batch
from engine.settings import Settings
from tests.engine.engines import WAIT_S, Request, make_talkative, settle, until

CONTEXT = 128
PROMPT = "오늘은 날씨가"
COUNT = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("fine-tunes")
    return [make_talkative(root / f"m{i}", seed=i, max_length=CONTEXT) for i in range(COUNT)]


def make_engine(backend: str, **settings: Any) -> Engine:
    return Engine(Settings(memory_mib=64, backend=backend, **settings))


def fit(engine: Engine, count: int) -> None:
    """From now on so many of the loaded models can be resident beside a row, and no more."""
    model = next(iter(engine._models.values())).core
    engine.budget.total_bytes = count * model.reserved_bytes + model.row_bytes


@pytest.fixture(params=["mxnet", "native"])
def engine(request: pytest.FixtureRequest, folders: list[Path]) -> Iterator[Engine]:
    """Two of its six models fit."""
    made = make_engine(request.param)
    for folder in folders:
        made.load(folder.name, str(folder))
    fit(made, 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> dict[str, dict[str, list[int]]]:
    """What each model says when it has the engine to itself, by backend."""
    found: dict[str, dict[str, list[int]]] = {}
    for backend in ("mxnet", "native"):
        found[backend] = {}
        for folder in folders:
            made = make_engine(backend)
            made.load(folder.name, str(folder))
            found[backend][folder.name] = ask(made, folder.name)
            made.close()
    return found


def ask(engine: Engine, name: str, tokens: int = 12) -> list[int]:
    answered = Request(engine, name, PROMPT, max_new_tokens=tokens).wait()
    assert answered.error is None
    settle(engine)  # its row is closed after it was answered
    return answered.ids()


@contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """The engine's thread stands still, so that all that is asked inside comes at once."""
    held = threading.Event()
    with ThreadPoolExecutor() as pool:
        pause = pool.submit(engine._loop.call, lambda: held.wait(WAIT_S))
        yield
        held.set()
        pause.result(WAIT_S)


def places(engine: Engine) -> dict[str, str]:
    return {said["name"]: said["residency"] for said in engine.models()}


def resident(engine: Engine) -> list[str]:
    return sorted(name for name, place in places(engine).items() if place == "hot")


def backend_of(engine: Engine) -> str:
    return next(iter(engine._models.values())).core.backend


@pytest.mark.slow
def test_all_answer_right_and_never_more_are_resident_than_fit(
    engine: Engine, alone: dict[str, dict[str, list[int]]]
) -> None:
    right = alone[backend_of(engine)]
    names = random.Random(7).choices(sorted(right), weights=[8, 4, 3, 2, 2, 1], k=60)  # noqa: S311
    for name in right:  # they were loaded where all had room
        ask(engine, name)
    most = [0]
    take = engine.budget.take

    def noted(size: int) -> None:
        take(size)
        most[0] = max(most[0], engine.budget.weight_bytes + engine.budget.kv_bytes)

    engine.budget.take = noted  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        for name, ids in zip(names, pool.map(lambda name: ask(engine, name), names), strict=True):
            assert ids == right[name]
    assert 0 < most[0] <= engine.budget.total_bytes
    until(lambda: engine.budget.kv_bytes == 0)
    held = [said["held_bytes"] for said in engine.models()]
    assert sum(held) == engine.budget.weight_bytes
    assert engine.statistics()["opened"] > 10


def test_the_least_recently_used_model_makes_space(engine: Engine) -> None:
    for name in ("m0", "m0", "m0", "m1"):
        ask(engine, name)
    assert resident(engine) == ["m0", "m1"]
    ask(engine, "m2")
    assert resident(engine) == ["m0", "m2"]
    assert engine._models["m1"].core.compute is None


@pytest.mark.slow
def test_a_prepared_model_needs_its_artifact_no_more(folders: list[Path], tmp_path: Path) -> None:
    changing = make_talkative(tmp_path / "바뀌는", seed=9, max_length=CONTEXT)
    engine = make_engine("native", cache_dir=str(tmp_path / "cache"))
    try:
        for folder in (changing, folders[0]):
            engine.load(folder.name, str(folder))
        before = {name: ask(engine, name) for name in ("바뀌는", "m0")}
        fit(engine, 1)
        make_talkative(changing, seed=2, max_length=CONTEXT)
        for name in ("m0", "바뀌는", "m0", "바뀌는"):
            assert ask(engine, name) == before[name]
            assert resident(engine) == [name]
    finally:
        engine.close()


def test_who_waits_gets_the_place_of_a_model_that_is_always_busy(
    engine: Engine, alone: dict[str, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "DRAIN_AFTER_S", 0)
    monkeypatch.setattr(residency, "MIN_RESIDENCE_FACTOR", 0)
    fit(engine, 1)
    engine._models["m0"].batch.max_rows = 1
    ask(engine, "m0")
    ended: list[str] = []

    def begin(name: str, label: str, tokens: int) -> Request:
        def on_token(request: Request) -> None:
            if request.tokens[-1].finish_reason:
                ended.append(label)

        return Request(engine, name, PROMPT, on_token, max_new_tokens=tokens)

    with paused(engine):
        busy = [begin("m0", f"busy {i}", 12) for i in range(4)]
        cold = begin("m1", "cold", 12)
    for request in (*busy, cold):
        assert request.wait().error is None
    assert cold.ids() == alone[backend_of(engine)]["m1"]
    assert ended.index("cold") < ended.index("busy 3")  # it did not wait for all of them


def test_keys_and_values_take_the_place_of_weights_that_nobody_uses(engine: Engine) -> None:
    model = engine._models["m0"].core
    fit(engine, 2)
    for name in ("m0", "m1"):
        ask(engine, name)
    rows = engine.budget.free_bytes // model.row_bytes + 1
    with paused(engine):
        long = [Request(engine, "m0", PROMPT, max_new_tokens=CONTEXT) for _ in range(rows)]
    for request in long:
        assert request.wait().finish_reason() == "length"
    assert places(engine)["m1"] == "parked"


def test_a_model_is_unloaded_wherever_it_is(engine: Engine) -> None:
    for name in ("m0", "m1"):
        ask(engine, name)
    for name in sorted(places(engine)):
        engine.unload(name)
    assert (engine.budget.weight_bytes, engine.budget.declared_bytes) == (0, 0)
    assert engine.models() == []


def test_a_model_whose_prepared_file_is_gone_comes_back_only_as_it_was(
    folders: list[Path], tmp_path: Path
) -> None:
    engine = make_engine("native")
    changing = make_talkative(tmp_path / "changing", seed=1, max_length=CONTEXT)
    try:
        for folder in (changing, folders[0]):
            engine.load(folder.name, str(folder))
        fit(engine, 1)
        ask(engine, "m0")
        shutil.rmtree(changing / ".prepared")
        make_talkative(changing, seed=2, max_length=CONTEXT)
        refused = Request(engine, "changing", PROMPT, max_new_tokens=2).wait()
        assert isinstance(refused.error, ArtifactError)
        assert "changed since it was loaded" in refused.error.message
        ask(engine, "m0")
        engine.unload("changing")
        engine.load("changing", str(changing))
        ask(engine, "changing")
    finally:
        engine.close()


def test_no_more_are_loaded_than_the_setting_allows(folders: list[Path]) -> None:
    engine = make_engine("native", overcommit=2)
    try:
        model = engine.load("m0", str(folders[0])).core
        # With a row beside them, three in twice the memory of two.
        engine.budget.total_bytes = 2 * model.reserved_bytes
        for folder in folders[1:3]:
            engine.load(folder.name, str(folder))
        with pytest.raises(OutOfMemory, match="of the engine's 2 times") as refused:
            engine.load("m3", str(folders[3]))
        assert refused.value.missing_bytes == model.row_bytes
    finally:
        engine.close()


# With fakes


class Disk:
    """A backend's stand-in: what was opened and closed, in order; `hold` keeps it from opening."""

    def __init__(self, name: str, log: list[str], mapped: bool) -> None:
        self.mapped = [(0, 0)] if mapped else []
        self.max_rows, self.weight_bytes, self.kv_bytes = 8, 0, 0
        self._name, self._log = name, log

    def close(self) -> None:
        self._log.append(f"close {self._name}")


class House:
    """Models of 100 bytes, with rows of 10, where `memory` bytes are."""

    def __init__(self, memory: int, mapped: bool) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.models: dict[str, Core] = {}
        self.budget = Budget(memory, overcommit=100)
        self.changed = threading.Condition()
        self.residency = Residency(
            self.changed, self.models, self.budget, Prefixes(0), lambda: self.now
        )
        self.mapped = mapped
        self.faults: dict[str, Exception] = {}

    def add(self, name: str) -> Core:
        def open_it(run: Any) -> Any:
            self.log.append(f"open {name}")
            if name in self.faults:
                raise self.faults.pop(name)
            return Disk(name, self.log, self.mapped)

        model = Core(
            name=name,
            key=name,
            path=Path(),
            backend="fake",
            precision="",
            artifact=cast(Any, SimpleNamespace(config=GPT2Config(1, 1, 1, 1, 1, 1))),
            open=open_it,
            batch=Batch(8, self.budget, Prefixes(0)),
            reserved_bytes=100,
        )
        self.residency.open_new(model, Reading())
        self.models[name] = model
        return model

    def touch(self, model: Core) -> None:
        """A request that is answered at once."""
        self.now += 1
        self.residency.acquire(model)
        with self.changed:
            assert self.changed.wait_for(lambda: model.can_step, WAIT_S)
        self.residency.release(model)


@pytest.fixture
def house() -> Iterator[House]:
    made = House(memory=400, mapped=True)
    yield made
    made.residency.close()


def test_a_scan_does_not_push_out_what_is_asked_often(house: House) -> None:
    often = [house.add(name) for name in "ab"]
    rare = [house.add(str(i)) for i in range(10)]
    for model in often * 20:
        house.touch(model)
    for model in rare:
        house.touch(model)
        assert all(m.resident for m in often)


def test_no_more_are_resident_than_the_container_has_memory_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all other processes take is not in the budget."""
    for model in [house.add(name) for name in "abc"]:
        house.touch(model)
    assert sum(m.resident for m in house.models.values()) == 3
    share, two = residency.RESERVE_DIVISOR, 2 * 100 + 20
    free = -(-two * share // (share - 1))  # with the share that is kept for others
    monkeypatch.setattr(residency, "container_memory", lambda: Memory(free, 0))
    house.touch(house.add("d"))
    assert sum(m.resident for m in house.models.values()) == 2
    monkeypatch.setattr(residency, "container_memory", lambda: Memory(0, 0))
    house.touch(house.add("e"))  # one is always resident
    assert [m.name for m in house.models.values() if m.resident] == ["e"]


def test_what_was_asked_often_once_cools(house: House) -> None:
    before = house.add("before")
    for _ in range(10):
        house.touch(before)
    others = [house.add(name) for name in "cde"]
    for model in others * 20:
        house.touch(model)
    assert not before.resident


def test_what_cannot_be_opened_again_fails_its_requests_and_holds_nothing(house: House) -> None:
    model = house.add("m")
    house.residency.close_core(model)
    assert house.budget.weight_bytes == 0
    house.faults["m"] = OSError("the disk")
    failed = threading.Event()
    found: list[Any] = []

    class Waiting:
        def fail(self, error: EngineError) -> None:
            found.append(error)
            failed.set()

    model.batch.clear = lambda: [Waiting()]  # type: ignore[method-assign,assignment,return-value,list-item]
    house.residency.acquire(model)
    assert failed.wait(WAIT_S)
    house.residency.release(model)
    assert isinstance(found[0], EngineError)
    assert (house.budget.weight_bytes, model.moving) == (0, False)
    house.touch(model)  # the next one opens it
    assert model.resident


def test_a_load_that_is_given_up_waits_no_longer(house: House) -> None:
    for name in "abc":
        model = house.add(name)
        house.residency.acquire(model)  # for ever
    reading = Reading()
    reading.cancel()
    fourth = house.models.pop("c")
    house.models["c"] = fourth
    with pytest.raises(Cancelled):
        house.residency.open_new(
            Core(
                name="d",
                key="d",
                path=Path(),
                backend="fake",
                precision="",
                artifact=fourth.artifact,
                open=fourth.open,
                batch=Batch(8, house.budget, Prefixes(0)),
                reserved_bytes=fourth.reserved_bytes,
            ),
            reading,
        )
    assert not house.residency._queue
