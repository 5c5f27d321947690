"""Turns are fair between models, and a fault ends what it concerns alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import engine.step_loop
from common.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    ModelNotFound,
    OutOfMemory,
)
from common.memory import MIB
from common.parameters import Parameters
from engine.artifacts.config import GPT2Config
from engine.backends.interface import Piece
from engine.backends.page_cache import Span
from engine.budget import Budget
from engine.engine import Engine
from engine.generation import Generation
from engine.model import Core, Model, Residence
from engine.native.model import NativeModel
from engine.prefixes import Prefixes
from engine.scheduler import Batch
from engine.step_loop import PREFILL_TOKENS, Loop
from tests.engine.conftest import NewEngine
from tests.engine.engines import WAIT_S, Gate, Pause, Request, Result, make_talkative, model_on
from tests.processes import eventually

VOCAB = 40


@dataclass(eq=False)
class FakeRow:
    length: int = 0
    num_bytes: int = 0


class Fake:
    """A backend that notes what it computes. After token i it finds i + 1 the likeliest."""

    config = GPT2Config(VOCAB, 8, 1, 1, 32, 1024)
    weight_bytes, max_rows, kv_bytes = 0, 32, 0
    mapped: ClassVar[list[Span]] = []
    caches_rows = False

    def __init__(self, name: str, done: list[tuple[str, list[int]]]) -> None:
        self.name, self.done = name, done
        self.faults: dict[str, BaseException] = {}  # by method: raised once
        self.before_run: Callable[[list[Piece]], object] = lambda pieces: None

    def _do(self, what: str) -> None:
        if what in self.faults:
            raise self.faults.pop(what)

    def open_row(self, source: FakeRow | None = None, length: int = 0) -> FakeRow:
        self._do("open_row")
        return FakeRow(length)

    def close_row(self, row: FakeRow) -> None:
        self._do("close_row")

    def run(self, pieces: list[Piece]) -> NDArray[np.float32]:
        self.before_run(pieces)
        if any(len(piece.ids) > 1 for piece in pieces):
            self._do("prompt")
        self._do("run")
        self.done.append((self.name, [len(piece.ids) for piece in pieces]))
        wanted: list[int] = []
        for piece in pieces:
            cast(FakeRow, piece.row).length += len(piece.ids)
            wanted += piece.ids[len(piece.ids) - piece.num_logits :]
        return np.eye(VOCAB, dtype=np.float32)[(np.array(wanted, int) + 1) % VOCAB]

    def kv_bytes_for(self, lengths: Any) -> int:
        return sum(lengths)

    def close(self) -> None:
        self._do("close")


class Answer(Result):
    """A sequence in a model's queue, and what became of it."""

    def __init__(
        self, loop: Loop, model: Model, length: int, new: int, deadline: float | None = None
    ) -> None:
        super().__init__()
        parameters, ids = Parameters(max_new_tokens=new), [5] * length
        self.sequence = Generation(
            prompt=ids,
            parameters=parameters,
            max_length=1024,
            stop_ids=frozenset(),
            emit=self.emit,
            model=model,
            deadline=deadline,
        )
        with loop.changed:
            model.batch.waiting.append(self.sequence)
            loop.add(model.core)


class Bench:
    """A loop over models on fake backends."""

    def __init__(self) -> None:
        self.done: list[tuple[str, list[int]]] = []
        self.models: dict[str, Model] = {}
        self.lost: list[str] = []
        self.budget = Budget(MIB)
        self.loop = Loop(threading.Condition(), self._lose)

    def _lose(self, core: Core, error: Exception) -> None:
        del self.models[core.name]
        self.lost.append(core.name)
        core.batch.end(EngineError("lost"))

    def add(self, name: str = "m", max_rows: int = 8) -> Model:
        batch = Batch(max_rows, self.budget, Prefixes(0))
        self.models[name] = model_on(Fake(name, self.done), batch, name)
        return self.models[name]

    def queue(
        self, *wanted: tuple[Model, int, int], change: Callable[[list[Answer]], object] = len
    ) -> list[Answer]:
        """Answers of (model, prompt's length, new tokens), queued at once, between two turns."""
        made: list[Answer] = []

        def queue() -> None:
            made.extend(Answer(self.loop, *one) for one in wanted)
            change(made)

        self.loop.call(queue)
        return made


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.loop.close()


def fake(model: Model) -> Fake:
    return cast(Fake, model.core.compute)


def right(length: int) -> list[int]:
    return [(6 + i) % VOCAB for i in range(length)]


def errors(answers: list[Answer]) -> list[type | None]:
    return [error and type(error) for error in (one.wait().error for one in answers)]


# Fairness


def test_seven_long_prompts_hold_a_running_row_for_no_longer_than_one(bench: Bench) -> None:
    quick = bench.add("quick")
    long = [bench.add(f"long {i}") for i in range(7)]
    answers = bench.queue((quick, 3, 100), *((model, 512, 2) for model in long))
    assert errors(answers) == [None] * 8
    turns: list[dict[str, int]] = [{}]  # tokens of prompts by model, between two steps of `quick`
    for name, counts in bench.done[bench.done.index(("quick", [1])) :]:
        if name == "quick":
            turns.append({})
        elif counts != [1]:
            turns[-1][name] = turns[-1].get(name, 0) + sum(counts)
    assert max(sum(turn.values()) for turn in turns) <= PREFILL_TOKENS
    # And the seven get on together.
    progress = dict.fromkeys((model.name for model in long), 0)
    for turn in turns:
        for name, tokens in turn.items():
            progress[name] += tokens
    assert max(progress.values()) - min(progress.values()) <= 256 + PREFILL_TOKENS


def test_short_prompts_of_several_models_share_a_turn(bench: Bench) -> None:
    models = [bench.add(str(i)) for i in range(4)]
    answers = bench.queue(*((model, 16, 3) for model in models))
    assert [one.wait().ids() for one in answers] == [right(3)] * 4
    assert [counts for _, counts in bench.done] == [[16]] * 4 + [[1]] * 8
    for turn in range(0, 12, 4):
        assert len({name for name, _ in bench.done[turn : turn + 4]}) == 4


def test_a_prompt_goes_before_answers_that_only_go_on(bench: Bench) -> None:
    """Also one that comes in the middle of a turn: it waits for one pass."""
    busy, late = [bench.add(str(i)) for i in range(3)], bench.add("late")
    bench.queue((late, 3, 1))[0].wait()  # its last prompt is the newest of all from now on
    came: list[Answer] = []

    def queue_late(_: list[Piece]) -> None:
        if not came and all((name, [3]) in bench.done for name in "012"):
            came.append(Answer(bench.loop, late, 3, 1))

    fake(busy[0]).before_run = queue_late
    answers = bench.queue(*((model, 3, 20) for model in busy))
    assert [one.wait().ids() for one in answers] == [right(20)] * 3
    assert came[0].wait().ids() == right(1)
    steps = [name for name, _ in bench.done]
    at = len(steps) - 1 - steps[::-1].index("late")
    assert steps[at - 1] == "0"


def test_a_model_that_cannot_compute_yet_still_ends_late_requests(bench: Bench) -> None:
    model = bench.add()
    model.core.residence = Residence.OPENING
    (answer,) = bench.queue((model, 3, 5))
    with bench.loop.changed:
        answer.sequence.deadline = time.monotonic() + 0.01
        bench.loop.changed.notify_all()
    assert errors([answer]) == [DeadlineExceeded]
    assert not bench.done


def test_a_deadline_wakes_a_loop_that_has_been_idle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.step_loop, "IDLE_BEFORE_RELEASE_S", 0.0)
    model, idle = bench.add(), threading.Event()
    bench.loop._on_idle = idle.set
    assert errors(bench.queue((model, 3, 1))) == [None]
    model.core.residence = Residence.OPENING
    assert idle.wait(WAIT_S)
    assert errors([Answer(bench.loop, model, 3, 5, time.monotonic() + 0.01)]) == [DeadlineExceeded]


# Faults


@pytest.mark.parametrize("after", [0, 3])
def test_a_row_that_cannot_go_on_ends_alone(bench: Bench, after: int) -> None:
    def break_sampling(made: list[Answer]) -> None:
        sequence, advance = made[1].sequence, made[1].sequence.advance

        def broken(logits: Any) -> bool:
            if sequence.num_new == after:
                raise ValueError("probabilities are NaN")
            return advance(logits)

        sequence.advance = broken  # type: ignore[method-assign]

    answers = bench.queue(*[(bench.add(max_rows=3), 5, 8)] * 5, change=break_sampling)
    error = answers.pop(1).wait().error
    assert error is not None
    assert (error.status, error.message) == (500, "a step of the model failed")
    assert [one.wait().ids() for one in answers] == [right(8)] * 4
    assert not bench.lost


def share_prompt(made: list[Answer]) -> None:
    """Makes them the answers of one request."""
    for one in made:
        one.sequence.prompt = made[0].sequence.prompt
        new = one.sequence.parameters.max_new_tokens
        one.sequence.parameters = Parameters(max_new_tokens=new, num_return_sequences=len(made))


MEMORY, FAULT = OutOfMemory("all pages are in use"), RuntimeError("a fault")


@pytest.mark.parametrize(
    ("where", "error", "max_rows", "failed", "change"),
    [
        ("prompt", MEMORY, 2, [None, OutOfMemory, None, None], len),  # the newest of the pass
        # The prompt of several answers is computed for the next.
        ("prompt", MEMORY, 3, [OutOfMemory, None, None, None], share_prompt),
        ("open_row", MEMORY, 8, [OutOfMemory, None, None, None], len),
        ("open_row", MemoryError(), 8, [OutOfMemory, None, None, None], len),
        ("run", FAULT, 2, [EngineError, EngineError, None, None], len),  # its rows, not the queue
    ],
)
def test_a_pass_that_fails_ends_the_rows_that_it_concerns(
    bench: Bench,
    where: str,
    error: Exception,
    max_rows: int,
    failed: list[type | None],
    change: Callable[[list[Answer]], object],
) -> None:
    model = bench.add(max_rows=max_rows)
    fake(model).faults[where] = error
    answers = bench.queue(*[(model, 5, 8)] * 4, change=change)
    assert errors(answers) == failed
    assert [one.ids() for one in answers if not one.error] == [right(8)] * failed.count(None)
    assert bench.budget.kv_bytes == 0
    assert not bench.lost


def test_all_answers_begin_when_their_prompt_is_computed(bench: Bench) -> None:
    """Also those for which there is no row yet; those of one token need none."""
    model, short = bench.add(max_rows=2), bench.add("short", max_rows=1)
    begun = list[list[int]]()
    fake(model).before_run = lambda pieces: begun.append(
        [one.num_new for one in (*model.batch.running, *model.batch.waiting)]
    )
    answers = bench.queue(*[(model, 5, 8)] * 4, change=share_prompt)
    assert [one.wait().ids() for one in answers] == [right(8)] * 4
    assert begun[:2] == [[0] * 4, [1] * 4]
    answers = bench.queue(*[(short, 5, 1)] * 3, change=share_prompt)
    assert [one.wait().ids() for one in answers] == [right(1)] * 3
    assert [counts for name, counts in bench.done if name == "short"] == [[5]]


def test_an_answer_that_failed_during_the_pass_of_its_prompt_gets_no_token(bench: Bench) -> None:
    model, answers = bench.add(), list[Answer]()

    def fail_first(_: list[Piece]) -> None:
        if not bench.done:
            answers[0].sequence.fail(EngineError("the client's own"))

    fake(model).before_run = fail_first
    bench.queue(*[(model, 5, 3)] * 2, change=answers.extend)
    assert answers[1].wait().ids() == right(3)
    assert (answers[0].wait().ids(), answers[0].sequence.num_new) == ([], 0)


@pytest.mark.parametrize("where", ["open_row", "close_row"])
def test_a_batch_that_is_broken_loses_its_model_and_no_other(bench: Bench, where: str) -> None:
    model, other = bench.add(), bench.add("other")
    fake(model).faults[where] = FAULT
    answers = bench.queue((model, 5, 3), (model, 5, 6), (other, 5, 8))
    assert answers[2].wait().ids() == right(8)
    assert answers[1].wait().error is not None
    assert bench.lost == ["m"]
    assert bench.loop.health()["status"] == "ok"


def test_a_model_that_was_lost_is_loaded_anew(tmp_path: Path, new_engine: NewEngine) -> None:
    folder = make_talkative(tmp_path / "m")
    engine = new_engine()
    model = engine.load("m", str(folder))

    def broken(*_: object) -> None:
        raise FAULT

    model.batch._cache_prefix = broken  # type: ignore[assignment,method-assign]
    Request(engine, "m", "가", max_new_tokens=2).wait()
    eventually(lambda: not engine.models())
    with pytest.raises(ModelNotFound):
        Request(engine, "m", "가")
    eventually(lambda: (engine.budget.weight_bytes, engine.budget.kv_bytes) == (0, 0))
    engine.load("m", str(folder))
    assert len(Request(engine, "m", "가", max_new_tokens=4).wait().ids()) == 4


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])  # 1.0: all bytes but the last
@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("backend", ["native", "mxnet"])
def test_a_prepared_file_that_is_cut_off_loses_its_model_only(
    tmp_path: Path, new_engine: NewEngine, backend: str, during: bool, kept: float
) -> None:
    """Between two passes, or while one reads it."""
    folders = {name: make_talkative(tmp_path / name) for name in ("소월", "other")}
    engine = new_engine(folders, backend=backend)
    before = Request(engine, "소월", "가", max_new_tokens=4).wait().ids()
    (file,) = (folders["소월"] / ".prepared").glob("*.safetensors")

    def cut() -> None:
        os.truncate(file, min(int(kept * file.stat().st_size), file.stat().st_size - 1))

    with Pause(engine):
        other = Request(engine, "other", "가", max_new_tokens=4)
        lost = Request(engine, "소월", "가", max_new_tokens=4)
        if during:
            before_pass(engine, "소월", cut)
        else:
            cut()
    assert isinstance(lost.wait().error, EngineUnavailable)
    assert not lost.tokens
    assert other.wait().ids()
    assert [model["name"] for model in engine.models()] == ["other"]
    engine.load("소월", str(folders["소월"]))
    assert Request(engine, "소월", "가", max_new_tokens=4).wait().ids() == before


def before_pass(engine: Engine, name: str, act: Callable[[], object]) -> None:
    """Call `act` in the next pass of a model, behind all checks."""
    compute = cast(NativeModel, engine._models[name].core.compute)
    run = compute._run_pass

    def run_once(*arguments: Any) -> None:
        compute._run_pass = run
        act()
        run(*arguments)

    compute._run_pass = run_once


def test_a_file_that_was_cut_off_and_is_as_long_as_before_is_not_trusted(
    tmp_path: Path, new_engine: NewEngine
) -> None:
    """As while `cp` writes it, or once `cp` has been stopped."""
    folder = make_talkative(tmp_path / "소월")
    engine = new_engine({"소월": folder})
    before = Request(engine, "소월", "가", max_new_tokens=4).wait().ids()
    (file,) = (folder / ".prepared").glob("*.safetensors")
    size = file.stat().st_size

    def cut() -> None:
        os.truncate(file, size // 2)

    before_pass(engine, "소월", cut)
    assert isinstance(Request(engine, "소월", "가").wait().error, EngineUnavailable)
    os.truncate(file, size)
    engine.load("소월", str(folder))
    assert Request(engine, "소월", "가", max_new_tokens=4).wait().ids() == before


# Health


def test_a_step_that_never_ends_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.loop.health() == {"status": "ok", "thread_alive": True, "step_age_s": 0.0}
    model, gate = bench.add(), Gate()
    fake(model).before_run = gate
    (answer,) = bench.queue((model, 5, 3))
    gate.reached()
    assert bench.loop.health()["status"] == "ok"
    monkeypatch.setattr(engine.step_loop, "STALLED_AFTER_S", 0.0)
    found = bench.loop.health()
    assert (found["status"], found["thread_alive"]) == ("failed", True)
    assert found["step_age_s"] >= 0
    monkeypatch.undo()
    gate.open()
    answer.wait()
    assert bench.loop.health()["status"] == "ok"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_reported_and_nothing_waits_for_it(bench: Bench) -> None:
    model = bench.add()
    fake(model).faults["run"] = SystemExit("a fault that is no Exception")
    bench.queue((model, 5, 3))
    eventually(lambda: not bench.loop.health()["thread_alive"])
    assert bench.loop.health()["status"] == "failed"
    with pytest.raises(EngineUnavailable, match="thread has ended"):
        bench.loop.call(lambda: None)
