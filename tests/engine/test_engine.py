"""The engine on real small models: exact text for everyone, and nothing left behind."""

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
from engine.settings import Settings
from engine.text.sentencepiece import SentencePieceTokenizer
from tests.engine.conftest import NewEngine
from tests.engine.engines import (
    EOS,
    WAIT_S,
    Pause,
    Request,
    is_greedy,
    make_talkative,
    prompt_of,
    settle,
    until,
)
from tests.engine.models import make_artifact
from tests.engine.sentences import SENTENCES

CONTEXT = 448  # longer than a prefill chunk
PROMPT = "오늘은 날씨가"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("engine") / "model", max_length=CONTEXT)


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine(memory_mib=64, max_rows=8, precision="fp32")


@pytest.fixture
def model(engine: Engine, model_dir: Path) -> Model:
    return engine.load("m", str(model_dir))


def prompt(model: Model, length: int) -> str:
    return prompt_of(SentencePieceTokenizer(model.path / "kogpt2.spiece").encode, length)


def begun(request: Request) -> Request:
    until(lambda: len(request.tokens) > 0)
    return request


# Exactness


@pytest.mark.slow
def test_cached_decoding_equals_decoding_without_a_cache(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    for length in range(2, 41):
        request = Request(engine, "m", prompt(model, length), max_new_tokens=12).wait()
        assert (len(request.prompt), len(request.ids())) == (length, 12)
        assert is_greedy(model_dir, request.prompt, request.ids())


@pytest.mark.parametrize("length", [64, 65, 128, 255, 256, 257, 320])
def test_a_prompt_in_pieces_gives_the_text_of_a_whole_one(
    engine: Engine, model: Model, model_dir: Path, length: int
) -> None:
    request = Request(engine, "m", prompt(model, length), max_new_tokens=10).wait()
    assert (len(request.prompt), len(request.ids())) == (length, 10)
    assert is_greedy(model_dir, request.prompt, request.ids())


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 300, CONTEXT - 1])
def test_an_answer_may_take_all_of_the_context_and_no_more(
    engine: Engine, model: Model, model_dir: Path, length: int
) -> None:
    request = Request(engine, "m", prompt(model, length), max_new_tokens=1_000_000).wait()

    assert request.finish_reason() == "length"
    assert len(request.prompt) + len(request.ids()) == CONTEXT
    assert is_greedy(model_dir, request.prompt, request.ids())


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_other_shapes_are_exact_as_well(engine: Engine, tmp_path: Path, activation: str) -> None:
    folder = make_talkative(
        tmp_path / "m", layers=3, units=60, heads=5, activation=activation, max_length=100, seed=5
    )
    engine.load("m", str(folder))
    request = Request(engine, "m", PROMPT, max_new_tokens=1000).wait()
    assert len(request.prompt) + len(request.ids()) == 100
    assert is_greedy(folder, request.prompt, request.ids())


def test_an_answer_stops_at_the_end_token(
    engine: Engine, model: Model, model_dir: Path, tmp_path: Path
) -> None:
    endless = [Request(engine, "m", s, max_new_tokens=20).wait() for s in SENTENCES]
    last = endless[0].ids()[10]
    folder = make_talkative(tmp_path / "m", max_length=CONTEXT, end_like=last)
    engine.load("stops", str(folder))

    answers = [Request(engine, "stops", s, max_new_tokens=20).wait() for s in SENTENCES]

    for before, answer in zip(endless, answers, strict=True):
        if answer.finish_reason() == "stop":
            assert answer.ids() == [*before.ids()[: len(answer.ids()) - 1], EOS]
            assert before.text().startswith(answer.text())
        else:
            assert answer.ids() == before.ids()
        assert is_greedy(folder, answer.prompt, answer.ids())
    assert answers[0].finish_reason() == "stop"


def test_rows_that_come_and_go_get_the_text_they_get_alone(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    """Requests start and are cancelled after certain tokens of others, so at certain steps."""
    rng = np.random.default_rng(23)
    lengths = [2, 3, 17, 60, 64, 130, 260]
    prompts = [prompt(model, length) for length in lengths]
    requests: list[Request] = []
    cancelled: list[Request] = []
    submitted: list[Any] = []  # by the text thread, which cannot wait for itself

    def submit() -> None:
        text, count = prompts[rng.integers(len(prompts))], int(rng.integers(1, 40))
        requests.append(Request(engine, "m", text, on_token, max_new_tokens=count))

    def on_token(request: Request) -> None:
        last = request.tokens[-1].finish_reason is not None
        if 7 + len(submitted) < 60 and (last or rng.random() < 0.1):
            submitted.append(pool.submit(submit))
        if len(cancelled) < 15 and rng.random() < 0.02:
            running = [r for r in requests if not r.done and r not in (request, *cancelled)]
            if running:
                cancelled.append(running[rng.integers(len(running))])
                engine.cancel(cancelled[-1].sequences)

    with ThreadPoolExecutor(1) as pool:
        with Pause(engine):
            for _ in range(7):
                submit()
        until(lambda: len(requests) == 60 and all(r.done or r in cancelled for r in requests))

    for request in requests:
        if request not in cancelled:
            assert len(request.ids()) == request.sequences[0].parameters.max_new_tokens
        assert not request.error
        assert is_greedy(model_dir, request.prompt, request.ids())
    assert len(cancelled) > 5
    assert model.statistics.rows / model.statistics.steps > 2  # they did share steps
    settle(engine)
    assert engine.budget.kv_bytes == 0


def test_each_of_two_models_gives_its_own_text(
    engine: Engine, model: Model, model_dir: Path, tmp_path: Path
) -> None:
    other = make_talkative(tmp_path / "other", seed=9)
    engine.load("다른 모델", str(other))
    requests = [
        Request(engine, name, sentence, max_new_tokens=20)
        for sentence in SENTENCES
        for name in ("m", "다른 모델")
    ]
    for request, folder in zip(requests, [model_dir, other] * len(SENTENCES), strict=True):
        assert is_greedy(folder, request.wait().prompt, request.ids())
    assert requests[0].ids() != requests[1].ids()


# Requests


def test_a_prompt_that_fills_the_context_is_too_long(engine: Engine, model: Model) -> None:
    with pytest.raises(PromptTooLong, match=rf"{CONTEXT} tokens, at most {CONTEXT - 1}"):
        Request(engine, "m", prompt(model, CONTEXT))
    assert Request(engine, "m", prompt(model, CONTEXT - 1)).wait().finish_reason() == "length"


def test_the_same_seed_gives_the_same_text(engine: Engine, model: Model) -> None:
    first = Request(engine, "m", PROMPT, seed=4, max_new_tokens=20).wait().ids()
    in_company = [Request(engine, "m", PROMPT, seed=4 + i, max_new_tokens=20) for i in range(4)]
    assert in_company[0].wait().ids() == first
    assert all(request.wait().ids() != first for request in in_company[1:])


def test_several_answers_are_drawn_with_seeds_one_after_another(
    engine: Engine, model: Model
) -> None:
    several = Request(
        engine, "m", PROMPT, seed=10, num_return_sequences=3, max_new_tokens=15, top_k=50
    ).wait()
    for index in range(3):
        one = Request(engine, "m", PROMPT, seed=10 + index, max_new_tokens=15, top_k=50).wait()
        assert several.ids(index) == one.ids()
        assert several.text(index) == one.text()


def test_statistics_count_requests_and_tokens(engine: Engine, model: Model) -> None:
    requests = [Request(engine, "m", s, max_new_tokens=7).wait() for s in SENTENCES]
    settle(engine)
    (found,) = engine.models()
    assert found["requests"] == len(SENTENCES)
    assert found["tokens"] == 7 * len(SENTENCES)
    assert found["prompt_tokens"] == sum(len(request.prompt) for request in requests)
    assert (found["running"], found["waiting"], found["kv_bytes"]) == (0, 0, 0)


# Fairness, cancellation, deadlines, overload


def test_a_busy_model_does_not_hold_up_another(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    quick = engine.load("quick", str(model_dir))
    short: list[Request] = []
    steps: list[int] = []  # of the busy model, when the other computes

    def noted(compute: Any) -> Any:
        def call(*arguments: Any) -> Any:
            steps.append(model.statistics.steps)
            return compute(*arguments)

        return call

    quick.core.compute.run = noted(quick.core.compute.run)  # type: ignore[method-assign]

    def on_long(request: Request) -> None:
        if model.statistics.steps >= 20 and not short:
            short.append(Request(engine, "quick", PROMPT, max_new_tokens=6))

    long = [Request(engine, "m", s, on_long, max_new_tokens=200) for s in SENTENCES]
    long[0].wait()
    short[0].wait()

    assert len(long) == 8
    assert quick.statistics.steps == 5
    # Its turns alternate with those of the busy model, the first of which was under way.
    assert steps[-1] - steps[0] <= 6
    for request in long:
        assert len(request.wait().ids()) == 200


def test_a_long_prompt_does_not_hold_up_another_model(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    engine.load("quick", str(model_dir))
    with Pause(engine):
        long = [Request(engine, "m", prompt(model, 400), max_new_tokens=3) for _ in range(4)]
        finished_before: list[bool] = []
        short = Request(
            engine,
            "quick",
            PROMPT,
            lambda request: finished_before.append(any(r.done for r in long[1:])),
            max_new_tokens=3,
        )
    short.wait()
    assert not any(finished_before)
    for request in long:
        request.wait()


def test_a_full_queue_says_when_to_come_back(model_dir: Path, new_engine: NewEngine) -> None:
    engine = new_engine(memory_mib=64, max_rows=1, max_queue=2)
    engine.load("m", str(model_dir))
    with Pause(engine):
        waiting = [Request(engine, "m", PROMPT, max_new_tokens=3) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 requests wait") as caught:
            Request(engine, "m", PROMPT)
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 1
    for request in waiting:
        assert len(request.wait().ids()) == 3
    Request(engine, "m", PROMPT, max_new_tokens=1).wait()


# Memory


def test_a_model_that_does_not_fit_is_refused_with_numbers(
    model_dir: Path, tmp_path: Path, new_engine: NewEngine
) -> None:
    big = make_artifact(tmp_path / "big", units=256, layers=4, heads=4)  # 13 MiB
    engine = new_engine(memory_mib=14, overcommit=1, precision="fp32")
    small = engine.load("small", str(model_dir))
    before = engine.budget.weight_bytes
    for try_it in (engine.check, engine.load):
        with pytest.raises(OutOfMemory, match=r"big needs \d+ MiB, but of the engine's 14 MiB"):
            try_it("big", str(big))
    assert engine.budget.weight_bytes == before == small.core.reserved_bytes
    assert [m["name"] for m in engine.models()] == ["small"]
    Request(engine, "small", PROMPT, max_new_tokens=3).wait()


def test_a_model_larger_than_the_whole_budget_is_told_from_one_that_has_to_wait(
    tmp_path: Path, new_engine: NewEngine
) -> None:
    big = make_artifact(tmp_path / "big", units=256, layers=4, heads=4)  # 13 MiB
    engine = new_engine(memory_mib=4, precision="fp32")
    for try_it in (engine.check, engine.load):
        with pytest.raises(NeverFits, match=r"big needs 1\d MiB .* the engine has 4 MiB in all"):
            try_it("big", str(big))
    assert engine.budget.weight_bytes == 0


def test_a_model_that_is_unloaded_makes_room(model_dir: Path) -> None:
    engine = Engine(Settings(memory_mib=2, overcommit=1, precision="fp32"))
    engine.budget.total_bytes = 1_300_000  # for one of them
    try:
        engine.load("a", str(model_dir))
        with pytest.raises(OutOfMemory):
            engine.load("b", str(model_dir))
        engine.unload("a")
        assert engine.budget.weight_bytes == 0
        needed = engine.check("b", str(model_dir))
        assert engine.load("b", str(model_dir)).core.reserved_bytes == needed
    finally:
        engine.close()
    assert engine.budget.weight_bytes == 0


@pytest.mark.slow
def test_weights_leave_room_for_one_request_of_the_whole_context(
    model_dir: Path, tmp_path: Path, new_engine: NewEngine
) -> None:
    long = make_talkative(tmp_path / "long", max_length=2 * CONTEXT)
    engine = new_engine(memory_mib=64, overcommit=1, precision="fp32")
    first = engine.load("m", str(model_dir))
    row = first.core.compute.kv_bytes_for([CONTEXT])
    size = first.core.reserved_bytes
    engine.budget.total_bytes = 2 * size + row - 1
    for try_it in (engine.check, engine.load):
        with pytest.raises(OutOfMemory, match="other needs 1 MiB"):
            try_it("other", str(model_dir))
    engine.budget.total_bytes += 1
    engine.load("other", str(model_dir))
    whole = [Request(engine, name, PROMPT, max_new_tokens=9999) for name in ("m", "other")]
    assert all(request.wait().finish_reason() == "length" for request in whole)

    engine.unload("other")
    engine.budget.total_bytes = 64 << 20
    needed = engine.check("long", str(long)) + 2 * row
    engine.budget.total_bytes = needed - 1
    with pytest.raises(NeverFits):
        engine.load("long", str(long))
    engine.budget.total_bytes = size + needed
    engine.load("long", str(long))
    engine.budget.total_bytes += size - 1
    with pytest.raises(OutOfMemory):  # the longer context's row has to stay
        engine.load("other", str(model_dir))


def test_what_is_missing_for_a_model_is_told_in_bytes(
    model_dir: Path, new_engine: NewEngine
) -> None:
    engine = new_engine(memory_mib=64, overcommit=1)
    model = engine.load("a", str(model_dir))
    row = model.core.compute.kv_bytes_for([CONTEXT])
    assert model.describe()["row_bytes"] == row
    engine.budget.total_bytes = 2 * model.core.reserved_bytes + row - 7
    for try_it in (engine.check, engine.load):
        with pytest.raises(OutOfMemory) as refused:
            try_it("b", str(model_dir))
        assert refused.value.missing_bytes == 7


def test_memory_promised_to_a_load_is_its_own_before_the_load_has_taken_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, new_engine: NewEngine
) -> None:
    engine = new_engine(memory_mib=64, overcommit=1, precision="fp32")
    opening, opened = threading.Event(), threading.Event()
    manifests = engine._loader._manifests
    open_manifest = manifests.open

    def open_slowly(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            opening.set()
            assert opened.wait(WAIT_S)
        return open_manifest(*arguments)

    monkeypatch.setattr(manifests, "open", open_slowly)
    promised = {"봄": engine.check("봄", str(model_dir))}
    engine.budget.total_bytes = 1_300_000  # for one of them
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(engine.load, "봄", str(model_dir))
        assert opening.wait(WAIT_S)
        try:
            with pytest.raises(OutOfMemory):
                engine.check("여름", str(model_dir), promised=promised)
        finally:
            opened.set()
        assert load.result(WAIT_S).core.reserved_bytes == promised["봄"]
    engine.budget.total_bytes += promised["봄"]  # no more is taken twice
    engine.check("여름", str(model_dir), promised=promised)


def test_a_model_has_as_many_rows_as_it_was_loaded_with(
    model_dir: Path, new_engine: NewEngine
) -> None:
    engine = new_engine(memory_mib=64, max_rows=5)
    assert engine.load("a", str(model_dir)).batch.max_rows == 5
    assert engine.load("b", str(model_dir), max_rows=2).batch.max_rows == 2
    for try_it in (engine.check, engine.load):
        with pytest.raises(InvalidRequest, match="precision is 'int8-kv8'"):
            try_it("c", str(model_dir), "mxnet", "int8-kv8")


def test_models_wait_for_memory_that_another_model_uses(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    engine.load("other", str(model_dir))
    per_token = model.core.compute.config.kv_bytes_per_token
    budget, free = engine.budget, list[int]()
    budget.total_bytes = budget.weight_bytes + 112 * per_token

    def seen(_: Request) -> None:
        free.append(budget.free_bytes)

    with Pause(engine):
        requests = [
            Request(engine, name, PROMPT, seen, max_new_tokens=70)
            for name in ("m", "other")
            for _ in "12"
        ]
    for request in requests:
        assert len(request.wait().ids()) == 70
        assert is_greedy(model_dir, request.prompt, request.ids())
    assert min(free) >= 0
    # Never two at once; the other's may be, once the first is idle and gives up its weights.
    assert model.statistics.rows == model.statistics.steps


# Loading and unloading


def test_who_unloads_a_model_that_another_is_unloading_waits_for_its_memory(
    engine: Engine, model: Model
) -> None:
    """A worker that ends has its model unloaded, and so does the gateway, which then gives the room
    to another model."""

    class Seen(threading.Event):
        waited = False

        def wait(self, timeout: float | None = None) -> bool:
            self.waited = True
            return super().wait(timeout)

    def unload_again() -> int:
        with pytest.raises(ModelNotFound):
            engine.unload("m")
        return engine.budget.declared_bytes

    with ThreadPoolExecutor(2) as pool:
        with Pause(engine):
            first = pool.submit(engine.unload, "m")
            until(lambda: "m" in engine._unloading)
            done = engine._unloading["m"]
            seen = engine._unloading["m"] = Seen()
            second = pool.submit(unload_again)
            until(lambda: second.done() or seen.waited)
            assert not second.done()
            assert engine.budget.declared_bytes > 0
            engine._unloading["m"] = done
            threading.Thread(target=lambda: (done.wait(), seen.set())).start()
        assert first.result()
        assert second.result() == 0
    assert not engine._unloading


def test_unloading_ends_the_requests_of_a_model_with_not_found(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    engine.load("other", str(model_dir))
    running = begun(Request(engine, "m", PROMPT, max_new_tokens=400))
    with Pause(engine) as pause, ThreadPoolExecutor() as pool:
        waiting = Request(engine, "m", PROMPT, max_new_tokens=400)
        elsewhere = Request(engine, "other", PROMPT, max_new_tokens=20)
        unloaded = pool.submit(engine.unload, "m")
        pause.go_on()
        unloaded.result(WAIT_S)
    for request in (running, waiting):
        assert isinstance(request.wait().error, ModelNotFound)
    assert len(elsewhere.wait().ids()) == 20
    assert [m["name"] for m in engine.models()] == ["other"]
    assert engine.budget.weight_bytes == engine._models["other"].core.reserved_bytes
    with pytest.raises(ModelNotFound):
        Request(engine, "m", PROMPT)
    with pytest.raises(ModelNotFound):
        engine.unload("m")


def test_a_model_can_be_loaded_again_after_it_was_unloaded(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    before = Request(engine, "m", PROMPT, max_new_tokens=10).wait().ids()
    for _ in range(3):
        engine.unload("m")
        engine.load("m", str(model_dir))
        assert Request(engine, "m", PROMPT, max_new_tokens=10).wait().ids() == before


def test_loads_of_one_name_at_once_do_the_work_once(
    engine: Engine, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine.engine")
    together = threading.Barrier(8)

    def load(_: int) -> Model:
        together.wait(WAIT_S)
        return engine.load("m", str(model_dir))

    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(load, range(8)))

    assert len({id(model) for model in models}) == 1
    assert engine.budget.weight_bytes == models[0].core.reserved_bytes
    assert sum("loaded m from" in message for message in caplog.messages) == 1


def test_loads_of_one_name_at_once_fail_together(engine: Engine, tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def load(_: int) -> Any:
        together.wait(WAIT_S)
        with pytest.raises(ArtifactError) as caught:
            engine.load("m", str(tmp_path))
        return caught.value

    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(load, range(4)))
    assert all("*.params" in error.message for error in errors)
    assert engine.models() == []


def test_a_load_of_the_same_folder_again_gives_the_model_that_is_there(
    engine: Engine, model: Model, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(model_dir)
    assert engine.load("m", str(model_dir) + "/") is model
    assert engine.load("m", str(tmp_path / "link"), "mxnet", "fp32") is model


def test_a_name_stands_for_one_folder_and_backend(
    engine: Engine, model: Model, model_dir: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model_dir, tmp_path / "copy")
    with pytest.raises(ModelAlreadyLoaded, match="unload it first"):
        engine.load("m", str(other))
    with pytest.raises(ModelAlreadyLoaded, match="mxnet, fp32"):
        engine.load("m", str(model_dir), "native")
    assert len(engine.models()) == 1


@pytest.mark.parametrize("damage", ["params", "spiece", "vocabulary", "precision", "backend"])
def test_a_failed_load_leaves_the_name_free_and_the_budget_as_before(
    engine: Engine, model_dir: Path, tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "damaged")
    options: dict[str, str] = {}
    expected: type[EngineError] = ArtifactError
    if damage == "params":
        (folder / "kogpt2.params").write_bytes((folder / "kogpt2.params").read_bytes()[:-50])
    elif damage == "spiece":
        (folder / "kogpt2.spiece").write_bytes(b"nothing of the kind")
    elif damage == "vocabulary":
        make_artifact(folder, vocab=50)
    else:
        options, expected = {damage: "int4"}, InvalidRequest
    with pytest.raises(expected):
        engine.load("m", str(folder), **options)
    assert (engine.budget.weight_bytes, engine.models()) == (0, [])

    engine.load("m", str(model_dir))
    assert len(Request(engine, "m", PROMPT, max_new_tokens=3).wait().ids()) == 3


def test_a_model_says_what_it_is(engine: Engine, model: Model, model_dir: Path) -> None:
    found = model.describe()
    assert (found["name"], found["model_dir"]) == ("m", str(model_dir))
    assert (found["backend"], found["precision"]) == ("mxnet", "fp32")
    assert found["max_length"] == CONTEXT
    assert 0 <= found["weight_bytes"] - engine.budget.weight_bytes < 32768  # the file's header


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    engine: Engine, model: Model, model_dir: Path
) -> None:
    def break_down(request: Request) -> None:
        raise RuntimeError("a fault in the middle of a step")

    broken = Request(engine, "m", PROMPT, break_down, max_new_tokens=5).wait()

    assert broken.error is not None
    assert broken.error.status == 500
    assert "fault" not in broken.error.message
    until(lambda: engine.budget.kv_bytes == 0)
    after = Request(engine, "m", PROMPT, max_new_tokens=5).wait()
    assert is_greedy(model_dir, after.prompt, after.ids())


def test_closing_ends_what_is_running(model_dir: Path) -> None:
    engine = Engine(Settings(memory_mib=64))
    engine.load("m", str(model_dir))
    running = begun(Request(engine, "m", PROMPT, max_new_tokens=400))
    with Pause(engine) as pause, ThreadPoolExecutor() as pool:
        closed = pool.submit(engine.close)
        pause.go_on()
        closed.result(WAIT_S)
    assert isinstance(running.wait().error, ModelNotFound)
    assert (engine.budget.weight_bytes, engine.budget.kv_bytes) == (0, 0)
