"""The engine on small real models: exact texts, admission to its memory, loads and unloads."""

from __future__ import annotations

import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import (
    ArtifactError,
    EngineError,
    InvalidRequest,
    ModelAlreadyLoaded,
    ModelNotFound,
    NeverFits,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
)
from engine.engine import Engine, Model
from engine.text.sentencepiece import SentencePieceTokenizer
from tests.engine.conftest import NewEngine
from tests.engine.engines import (
    WAIT_S,
    Gate,
    Pause,
    Request,
    is_greedy,
    make_talkative,
    settle,
)
from tests.engine.models import make_artifact
from tests.engine.sentences import SENTENCES
from tests.processes import eventually

CONTEXT = 448  # longer than a prefill chunk
PROMPT = "오늘은 날씨가"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("engine") / "model", max_length=CONTEXT)


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine(max_rows=8, overcommit=1, precision="fp32")


@pytest.fixture
def model(engine: Engine, folder: Path) -> Model:
    return engine.load("m", str(folder))


def prompt(model: Model, length: int) -> str:
    """A text of so many tokens."""
    encode = SentencePieceTokenizer(model.path / "kogpt2.spiece").encode
    text = " ".join(SENTENCES * 40)[: 6 * length + 6]
    return next(text[:end] for end in range(len(text), 0, -1) if len(encode(text[:end])) == length)


def ask(engine: Engine, new: int = 3, name: str = "m", text: str = PROMPT, **given: Any) -> Request:
    return Request(engine, name, text, max_new_tokens=new, **given)


# Texts


def test_answers_may_fill_the_context_and_are_exact(engine: Engine, model: Model) -> None:
    with Pause(engine):
        texts = [prompt(model, length) for length in (2, 64, 65, 257, CONTEXT - 1)]
        requests = [ask(engine, 1_000_000, text=text) for text in texts]
    for request in requests:
        assert request.wait().finish_reason() == "length"
        assert len(request.prompt) + len(request.ids()) == CONTEXT
        assert is_greedy(model.path, request.prompt, request.ids())
    with pytest.raises(PromptTooLong, match=rf"{CONTEXT} tokens, at most {CONTEXT - 1}"):
        ask(engine, text=prompt(model, CONTEXT))


def test_rows_that_come_and_go_get_the_text_they_get_alone(engine: Engine, model: Model) -> None:
    """Requests start and are cancelled after certain tokens of others, so at certain steps."""
    rng = np.random.default_rng(23)
    prompts = [prompt(model, length) for length in (2, 3, 17, 60, 64, 130, 260)]
    requests: list[Request] = []
    cancelled: list[Request] = []
    submitted: list[Any] = []  # by another thread: the text thread cannot wait for itself

    def submit() -> None:
        text, count = prompts[rng.integers(len(prompts))], int(rng.integers(1, 40))
        requests.append(ask(engine, count, text=text, on_token=on_token))

    def on_token(request: Request) -> None:
        last = request.tokens[-1].finish_reason is not None
        if 7 + len(submitted) < 60 and (last or rng.random() < 0.1):
            submitted.append(pool.submit(submit))
        running = [r for r in requests if not r.done and r not in (request, *cancelled)]
        if len(cancelled) < 15 and rng.random() < 0.02 and running:
            cancelled.append(running[rng.integers(len(running))])
            engine.cancel(cancelled[-1].sequences)

    with ThreadPoolExecutor(1) as pool:
        with Pause(engine):
            for _ in range(7):
                submit()
        eventually(lambda: len(requests) == 60 and all(r.done or r in cancelled for r in requests))
    for request in requests:
        if request not in cancelled:
            assert len(request.ids()) == request.sequences[0].parameters.max_new_tokens
        assert not request.error
        assert is_greedy(model.path, request.prompt, request.ids())
    assert len(cancelled) > 5
    assert model.statistics.rows / model.statistics.steps > 2  # they did share steps
    settle(engine)
    assert engine.budget.kv_bytes == 0


def test_several_answers_are_drawn_with_consecutive_seeds(engine: Engine, model: Model) -> None:
    several = ask(engine, 15, seed=10, num_return_sequences=3, top_k=50).wait()
    alone = [ask(engine, 15, seed=10 + index, top_k=50).wait() for index in range(3)]
    assert [several.text(index) for index in range(3)] == [one.text() for one in alone]
    assert several.text(0) != several.text(1)


def test_a_model_is_described_with_what_it_is_and_has_done(engine: Engine, model: Model) -> None:
    requests = [ask(engine, 7, text=s).wait() for s in SENTENCES]
    settle(engine)
    (found,) = engine.models()
    assert (found["name"], found["model_dir"]) == ("m", str(model.path))
    assert (found["backend"], found["precision"]) == ("mxnet", "fp32")
    assert found["max_length"] == CONTEXT
    assert 0 <= found["weight_bytes"] - engine.budget.weight_bytes < 32768  # the file's header
    assert (found["requests"], found["tokens"]) == (len(SENTENCES), 7 * len(SENTENCES))
    assert found["prompt_tokens"] == sum(len(request.prompt) for request in requests)
    assert (found["running"], found["waiting"], found["kv_bytes"]) == (0, 0, 0)


def test_a_full_queue_says_when_to_retry(folder: Path, new_engine: NewEngine) -> None:
    """By the time that requests took, from the first one on, and without the load's name."""
    name = "봄#4a814a-1"
    engine = new_engine({name: folder}, max_rows=1, max_queue=2)
    statistics = engine._models[name].statistics
    for seconds in (None, 60.0):
        if seconds is not None:
            statistics.seconds_per_request = 0.0
            statistics.finished(seconds)
        with Pause(engine):
            waiting = [ask(engine, name=name) for _ in range(2)]
            with pytest.raises(Overloaded) as caught:
                ask(engine, name=name)
        assert caught.value.message == "2 requests wait for this model already"
        assert caught.value.retry_after_s == (1.0 if seconds is None else 2 * seconds)
        assert [len(request.wait().ids()) for request in waiting] == [3, 3]
    ask(engine, 1, name).wait()


# Memory


def test_a_model_that_does_not_fit_is_refused_with_numbers(
    engine: Engine, model: Model, folder: Path, tmp_path: Path
) -> None:
    """Beside the weights there is space for one request of the longest context."""
    size, row, budget = model.core.reserved_bytes, model.core.row_bytes, engine.budget
    assert model.describe()["row_bytes"] == row == model.core.compute.kv_bytes_for([CONTEXT])

    def check_refused(name: str, path: Path, error: type[OutOfMemory], why: str) -> None:
        for load in (engine.check, engine.load):
            with pytest.raises(error, match=rf"the model needs \d+ MiB.*{why}") as refused:
                load(name, str(path))
        if error is OutOfMemory:
            assert refused.value.missing_bytes == 7
        assert budget.weight_bytes == size
        assert [m["name"] for m in engine.models()] == ["m"]

    budget.total_bytes = 2 * size + row - 7
    check_refused("b", folder, OutOfMemory, r"but of the engine's \d+ MiB")
    budget.total_bytes += 7
    assert engine.load("b", str(folder)).core.reserved_bytes == size
    whole = [ask(engine, 9999, name) for name in ("m", "b")]
    assert all(request.wait().finish_reason() == "length" for request in whole)
    engine.unload("b")
    long = make_talkative(tmp_path / "long", max_length=2 * CONTEXT)
    budget.total_bytes = 64 << 20
    needed = engine.check("long", str(long)) + 2 * row
    budget.total_bytes = needed - 1
    check_refused("long", long, NeverFits, r"the engine has \d+ MiB in all")
    budget.total_bytes = size + needed
    engine.load("long", str(long))
    budget.total_bytes += size - 1
    with pytest.raises(OutOfMemory):  # the longer context's row has to stay
        engine.load("b", str(folder))
    engine.unload("m")
    assert engine.check("b", str(folder)) == engine.load("b", str(folder)).core.reserved_bytes


def test_memory_promised_to_a_load_is_its_own_before_the_load_has_taken_it(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, manifests = Gate(), engine._loader._manifests
    open_manifest = manifests.open

    def open_slowly(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            gate()
        return open_manifest(*arguments)

    monkeypatch.setattr(manifests, "open", open_slowly)
    promised = {"봄": engine.check("봄", str(folder))}
    engine.budget.total_bytes = 1_300_000  # for one of them
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(engine.load, "봄", str(folder))
        gate.reached()
        try:
            with pytest.raises(OutOfMemory):
                engine.check("여름", str(folder), promised=promised)
        finally:
            gate.open()
        assert load.result(WAIT_S).core.reserved_bytes == promised["봄"]
    engine.budget.total_bytes += promised["봄"]  # no more is taken twice
    engine.check("여름", str(folder), promised=promised)


@pytest.mark.parametrize("heads", [4, 8])  # of 16 numbers and, padded to as many, of 8
def test_a_loaded_model_has_memory_for_a_request_of_its_whole_context(
    new_engine: NewEngine, tmp_path: Path, heads: int
) -> None:
    engine = new_engine()
    model = engine.load("m", str(make_talkative(tmp_path / "m", heads=heads)))
    engine.budget.total_bytes = model.core.reserved_bytes + model.core.row_bytes
    request = ask(engine, 127, text="가").wait()
    assert (request.error, len(request.prompt) + len(request.ids())) == (None, 128)


def test_models_wait_for_memory_that_another_model_uses(engine: Engine, model: Model) -> None:
    engine.load("other", str(model.path))
    budget, free = engine.budget, list[int]()
    per_token = model.core.compute.config.kv_bytes_per_token
    budget.total_bytes = budget.weight_bytes + 112 * per_token

    def note(_: Request) -> None:
        free.append(budget.free_bytes)

    with Pause(engine):
        requests = [ask(engine, 70, name, on_token=note) for name in ("m", "m", "other", "other")]
    for request in requests:
        assert len(request.wait().ids()) == 70
        assert is_greedy(model.path, request.prompt, request.ids())
    assert min(free) >= 0
    # Never two at once; the other's may be, once the first is idle and gives up its weights.
    assert model.statistics.rows == model.statistics.steps


# Loading and unloading


def test_a_second_unload_of_a_model_waits_for_the_first(engine: Engine, model: Model) -> None:
    """A worker that ends has its model unloaded, and so does the gateway, which then gives the
    memory to another model."""

    def unload_again() -> int:
        with pytest.raises(ModelNotFound):
            engine.unload("m")
        return engine.budget.declared_bytes

    with ThreadPoolExecutor(2) as pool:
        with Pause(engine):
            first = pool.submit(engine.unload, "m")
            done = eventually(lambda: engine._unloading.get("m"))
            second = pool.submit(unload_again)
            eventually(lambda: second.done() or done._cond._waiters)
            assert not second.done()
            assert engine.budget.declared_bytes > 0
        assert first.result()
        assert second.result() == 0
    assert not engine._unloading


def test_unloading_ends_the_requests_of_a_model_with_not_found(
    engine: Engine, model: Model
) -> None:
    engine.load("other", str(model.path))
    running = ask(engine, 400).begun()
    with Pause(engine) as pause, ThreadPoolExecutor() as pool:
        waiting, elsewhere = ask(engine, 400), ask(engine, 20, "other")
        unloaded = pool.submit(engine.unload, "m")
        pause.go_on()
        unloaded.result(WAIT_S)
    for request in (running, waiting):
        assert isinstance(request.wait().error, ModelNotFound)
    assert len(elsewhere.wait().ids()) == 20
    assert [m["name"] for m in engine.models()] == ["other"]
    assert engine.budget.weight_bytes == engine._models["other"].core.reserved_bytes
    for again in (ask, lambda engine: engine.unload("m")):
        with pytest.raises(ModelNotFound):
            again(engine)


def test_loads_of_one_name_at_once_do_the_work_once_or_fail_together(
    engine: Engine, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine.engine")

    def load_at_once(name: str, path: Path) -> list[Any]:
        together = threading.Barrier(8)

        def load(_: int) -> Any:
            together.wait(WAIT_S)
            try:
                return engine.load(name, str(path))
            except ArtifactError as error:
                return error.message

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(load, range(8)))

    (model,) = set(load_at_once("m", folder))
    assert engine.budget.weight_bytes == model.core.reserved_bytes
    assert sum("loaded m from" in message for message in caplog.messages) == 1
    assert all("*.params" in message for message in load_at_once("empty", tmp_path))
    assert [m["name"] for m in engine.models()] == ["m"]


def test_a_name_stands_for_one_folder_and_backend_until_it_is_unloaded(
    engine: Engine, model: Model, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert engine.load("m", str(folder) + "/") is model
    assert engine.load("m", str(tmp_path / "link"), "mxnet", "fp32") is model
    other = shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ModelAlreadyLoaded, match="unload it first"):
        engine.load("m", str(other))
    with pytest.raises(ModelAlreadyLoaded, match="mxnet, fp32"):
        engine.load("m", str(folder), "native")
    before = ask(engine, 10).wait().ids()
    engine.unload("m")
    assert engine.load("m", str(other), max_rows=2).batch.max_rows == 2  # of 8 by default
    assert ask(engine, 10).wait().ids() == before


@pytest.mark.parametrize("damage", ["params", "spiece", "vocabulary", "precision", "backend"])
def test_a_failed_load_leaves_the_name_free_and_the_budget_as_before(
    engine: Engine, folder: Path, tmp_path: Path, damage: str
) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    options: dict[str, str] = {}
    expected: type[EngineError] = ArtifactError
    if damage == "params":
        (damaged / "kogpt2.params").write_bytes((damaged / "kogpt2.params").read_bytes()[:-50])
    elif damage == "spiece":
        (damaged / "kogpt2.spiece").write_bytes(b"nothing of the kind")
    elif damage == "vocabulary":
        make_artifact(damaged, vocab=50)
    else:
        options, expected = {damage: "int4"}, InvalidRequest
    with pytest.raises(expected):
        engine.load("m", str(damaged), **options)
    assert (engine.budget.weight_bytes, engine.models()) == (0, [])
    engine.load("m", str(folder))
    assert len(ask(engine).wait().ids()) == 3


def test_closing_ends_running_requests(engine: Engine, model: Model) -> None:
    running = ask(engine, 400).begun()
    with Pause(engine) as pause, ThreadPoolExecutor() as pool:
        closed = pool.submit(engine.close)
        pause.go_on()
        closed.result(WAIT_S)
    assert isinstance(running.wait().error, ModelNotFound)
    assert (engine.budget.weight_bytes, engine.budget.kv_bytes) == (0, 0)


def test_closing_goes_on_when_a_model_is_unloaded_by_another_thread(
    engine: Engine, model: Model
) -> None:
    engine.load("둘째", str(model.path))
    with ThreadPoolExecutor() as pool, Pause(engine) as pause:
        closed = pool.submit(engine.close)
        eventually(lambda: "m" in engine._unloading)
        unloaded = pool.submit(engine.unload, "둘째")
        eventually(lambda: "둘째" in engine._unloading)
        pause.go_on()
        closed.result(WAIT_S)
        assert unloaded.result(WAIT_S)
    assert not engine._loop.health()["thread_alive"]
