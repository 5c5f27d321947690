"""More models are loaded than fit into memory, and each answers as if it were alone."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import ArtifactError, Cancelled, OutOfMemory
from common.memory import Memory
from engine import residency
from engine.engine import Engine
from engine.model import Core, Residence
from engine.native.model import NativeModel
from engine.sandbox.reading import Reading
from tests.engine.conftest import NewEngine
from tests.engine.engines import Gate, Pause, Request, make_talkative, settle
from tests.processes import eventually

CONTEXT = 128
PROMPT = "오늘은 날씨가"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("fine-tunes")
    return [make_talkative(root / f"m{i}", seed=i, max_length=CONTEXT) for i in range(6)]


def fit(engine: Engine, count: int) -> None:
    """Limit how many of the loaded models can be resident beside a row."""
    core = next(iter(engine._models.values())).core
    engine.budget.total_bytes = count * core.reserved_bytes + core.row_bytes


@pytest.fixture
def engine(folders: list[Path], new_engine: NewEngine) -> Engine:
    """Two of its six models fit."""
    made = new_engine({folder.name: folder for folder in folders}, backend="native")
    fit(made, 2)
    return made


def ask(engine: Engine, name: str, new: int = 12) -> list[int]:
    request = Request(engine, name, PROMPT, max_new_tokens=new).wait()
    assert request.error is None
    settle(engine)  # its row is closed after it was answered
    return request.ids()


def places(engine: Engine) -> dict[str, str]:
    return {model["name"]: model["residency"] for model in engine.models()}


def resident(engine: Engine) -> list[str]:
    return sorted(name for name, place in places(engine).items() if place == "hot")


@pytest.mark.slow
def test_all_answers_are_right_and_never_more_models_are_resident_than_fit(engine: Engine) -> None:
    fit(engine, 6)
    right = {name: ask(engine, name) for name in sorted(engine._models)}
    fit(engine, 2)
    for name in right:  # they were loaded where all had space
        ask(engine, name)
    names = random.Random(7).choices(sorted(right), weights=[8, 4, 3, 2, 2, 1], k=60)  # noqa: S311
    most = [0]
    take = engine.budget.take

    def note(size: int) -> None:
        take(size)
        most[0] = max(most[0], engine.budget.weight_bytes + engine.budget.kv_bytes)

    engine.budget.take = note  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        for name, ids in zip(names, pool.map(lambda name: ask(engine, name), names), strict=True):
            assert ids == right[name]
    assert 0 < most[0] <= engine.budget.total_bytes
    eventually(lambda: engine.budget.kv_bytes == 0)
    assert sum(model["held_bytes"] for model in engine.models()) == engine.budget.weight_bytes
    assert engine.statistics()["opened"] > 10


def test_the_least_recently_used_model_is_evicted(engine: Engine) -> None:
    for name in ("m0", "m0", "m0", "m1"):
        ask(engine, name)
    assert resident(engine) == ["m0", "m1"]
    ask(engine, "m2")
    assert resident(engine) == ["m0", "m2"]
    assert engine._models["m1"].core.compute is None
    for name in sorted(places(engine)):  # wherever it is
        engine.unload(name)
    assert (engine.budget.weight_bytes, engine.budget.declared_bytes) == (0, 0)
    assert engine.models() == []


def test_a_queued_model_gets_the_place_of_one_that_is_always_busy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "DRAIN_AFTER_S", 0)
    monkeypatch.setattr(residency, "MIN_RESIDENCE_FACTOR", 0)
    expected = ask(engine, "m1")
    fit(engine, 1)
    engine._models["m0"].batch.max_rows = 1
    ask(engine, "m0")
    ended: list[str] = []

    def begin(name: str, label: str) -> Request:
        def on_token(request: Request) -> None:
            if request.tokens[-1].finish_reason:
                ended.append(label)

        return Request(engine, name, PROMPT, on_token, max_new_tokens=12)

    with Pause(engine):
        requests = [*(begin("m0", f"busy {i}") for i in range(4)), begin("m1", "cold")]
    assert [request.wait().error for request in requests] == [None] * 5
    assert requests[-1].ids() == expected
    assert ended.index("cold") < ended.index("busy 3")  # it did not wait for all of them


def test_keys_and_values_take_the_place_of_weights_without_requests(engine: Engine) -> None:
    for name in ("m0", "m1"):
        ask(engine, name)
    rows = engine.budget.free_bytes // engine._models["m0"].core.row_bytes + 1
    with Pause(engine):
        long = [Request(engine, "m0", PROMPT, max_new_tokens=CONTEXT) for _ in range(rows)]
    assert [request.wait().finish_reason() for request in long] == ["length"] * rows
    assert places(engine)["m1"] == "parked"


def test_a_model_comes_back_from_its_prepared_file_or_only_as_it_was(
    folders: list[Path], tmp_path: Path, new_engine: NewEngine
) -> None:
    changing = make_talkative(tmp_path / "changing", seed=1, max_length=CONTEXT)
    engine = new_engine({"changing": changing, "m0": folders[0]}, backend="native")
    before = {name: ask(engine, name) for name in ("changing", "m0")}
    fit(engine, 1)
    make_talkative(changing, seed=2, max_length=CONTEXT)
    for name in ("m0", "changing", "m0"):
        assert ask(engine, name) == before[name]
        assert resident(engine) == [name]
    shutil.rmtree(changing / ".prepared")
    refused = Request(engine, "changing", PROMPT, max_new_tokens=2).wait()
    assert isinstance(refused.error, ArtifactError)
    assert "changed since they were read" in refused.error.message
    ask(engine, "m0")
    engine.unload("changing")
    engine.load("changing", str(changing))
    ask(engine, "changing")


def test_overcommit_bounds_the_loaded_models(folders: list[Path], new_engine: NewEngine) -> None:
    engine = new_engine(backend="native", overcommit=2)
    core = engine.load("m0", str(folders[0])).core
    # With a row beside them, three in twice the memory of two.
    engine.budget.total_bytes = 2 * core.reserved_bytes
    for folder in folders[1:3]:
        engine.load(folder.name, str(folder))
    with pytest.raises(OutOfMemory, match="of the engine's 2 times") as refused:
        engine.load("m3", str(folders[3]))
    assert refused.value.missing_bytes == core.row_bytes


def test_the_containers_memory_bounds_the_models(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of all other processes is not in the budget."""
    ask(engine, "m0")
    fit(engine, 6)
    ask(engine, "m1")
    assert len(resident(engine)) == 3
    size = engine._models["m0"].core.reserved_bytes
    share = residency.RESERVE_DIVISOR
    free = -(-2 * size * share // (share - 1))  # for two, with the share that is left to others
    for memory, count in ((free, 2), (0, 1)):  # one is always resident
        monkeypatch.setattr(residency, "container_memory", lambda free=memory: Memory(free, 0))
        name = next(name for name, place in sorted(places(engine).items()) if place != "hot")
        ask(engine, name)
        assert len(resident(engine)) == count
        assert name in resident(engine)


def test_a_model_that_cannot_be_opened_again_fails_its_requests(engine: Engine) -> None:
    ask(engine, "m5")
    core = engine._models["m0"].core
    assert not core.resident
    real = core.open

    def broken(run: Any) -> Any:
        raise OSError("the disk")

    core.open = broken
    error = Request(engine, "m0", PROMPT).wait().error
    assert error is not None
    assert error.message == "the model could not be opened again"
    # It may be opened twice: when the request comes, and when its prompt is tokenized.
    eventually(lambda: (core.held_bytes, core.moving) == (0, False))
    core.open = real
    ask(engine, "m0")  # the next one opens it


def test_a_cancelled_request_opens_no_evicted_model(engine: Engine) -> None:
    for name in ("m0", "m1"):
        ask(engine, name)
    names, opened = resident(engine), engine.statistics()["opened"]
    evicted = next(model for name, model in engine._models.items() if name not in names)
    with Pause(engine):
        running = [Request(engine, name, PROMPT, max_new_tokens=12) for name in names]
        engine.cancel(Request(engine, evicted.name, PROMPT).sequences)
    assert [len(request.wait().ids()) for request in running] == [12] * len(names)
    eventually(lambda: not engine._residency._queue)
    assert evicted.core.residence is Residence.EVICTED
    assert (resident(engine), engine.statistics()["opened"]) == (names, opened)


def test_a_cancelled_load_leaves_the_queue(engine: Engine) -> None:
    ask(engine, "m5")
    for name in resident(engine):
        engine._models[name].submitting += 1  # for ever
    reading = Reading()
    reading.cancel()
    with pytest.raises(Cancelled):
        engine._residency.open_new(engine._models["m0"].core, reading)
    assert not engine._residency._queue


def test_memory_that_a_close_will_free_is_not_freed_once_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose memory is free only after the close."""
    monkeypatch.setattr(Core, "is_mapped", False)
    fit(engine, 3)
    for name in ("m0", "m1", "m2"):
        ask(engine, name)
    assert resident(engine) == ["m0", "m1", "m2"]
    gate, close = Gate(), NativeModel.close
    monkeypatch.setattr(NativeModel, "close", lambda model: gate() and close(model))
    core = engine._models["m3"].core
    try:
        for _ in range(2):  # a reservation is tried again every few milliseconds
            engine.budget.on_kv_shortage(1)
            gate.reached()
        assert len(resident(engine)) == 2
        request = Request(engine, "m3", PROMPT, max_new_tokens=2)
        assert (len(resident(engine)), core.moving) == (2, False)
    finally:
        gate.open()
    assert len(request.wait().ids()) == 2
    assert len(resident(engine)) == 3
