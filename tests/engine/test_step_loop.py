"""Turns are fair between models, and what goes wrong in one row ends that row alone."""

from __future__ import annotations

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
from engine.model import Core, Model
from engine.prefixes import Prefixes
from engine.scheduler import Batch
from engine.sequence import Sequence, Token
from engine.step_loop import PREFILL_TOKENS, Loop
from engine.text.sentencepiece import SentencePieceTokenizer
from tests.engine.conftest import NewEngine
from tests.engine.engines import WAIT_S, Request, make_talkative, prompt_of, until

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
        self.faults: dict[str, Exception] = {}  # by method: raised once

    def _do(self, what: str) -> None:
        if what in self.faults:
            raise self.faults.pop(what)

    def open_row(self, source: FakeRow | None = None, length: int = 0) -> FakeRow:
        self._do("open_row")
        return FakeRow(length)

    def close_row(self, row: FakeRow) -> None:
        self._do("close_row")

    def run(self, pieces: list[Piece]) -> NDArray[np.float32]:
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


class Untold:
    """Stands in for `engine.text.process.Texts`: tells tokens at once and without a text."""

    def write(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            for token in sequence.take_tokens():
                sequence.send(token)


class Asked:
    """A sequence in a model's queue, and what became of it."""

    def __init__(self, loop: Loop, model: Model, length: int, new: int) -> None:
        self.ids: list[int] = []
        self.error: EngineError | None = None
        self.done = threading.Event()
        self.sequence = Sequence(
            prompt=[5] * length,
            parameters=Parameters(max_new_tokens=new),
            max_length=1024,
            stop_ids=frozenset(),
            emit=self._emit,
            model=model,
        )
        with loop.changed:
            model.batch.waiting.append(self.sequence)
            loop.add(model.core)

    def _emit(self, item: Token | EngineError) -> None:
        if isinstance(item, EngineError):
            self.error = item
            self.done.set()
        else:
            self.ids.append(item.id)
            if item.finish_reason:
                self.done.set()

    def wait(self) -> Asked:
        assert self.done.wait(WAIT_S)
        return self


class House:
    """A loop over models on fake backends."""

    def __init__(self) -> None:
        self.done: list[tuple[str, list[int]]] = []
        self.models: dict[str, Model] = {}
        self.lost: list[str] = []
        self.budget = Budget(MIB)
        self.loop = Loop(threading.Condition(), self._lose)

    def _lose(self, core: Core) -> None:
        del self.models[core.name]
        self.lost.append(core.name)
        for sequence in core.batch.clear():
            sequence.fail(EngineError("lost"))

    def add(self, name: str, max_rows: int = 8) -> Model:
        compute = Fake(name, self.done)
        core = Core(
            name=name,
            key=name,
            path=Path(),
            backend="fake",
            precision="",
            artifact=cast(Any, compute),  # for its configuration
            open=lambda run: cast(Any, compute),
            batch=Batch(max_rows, self.budget, Prefixes(0)),
            reserved_bytes=0,
            compute=compute,  # type: ignore[arg-type]
            resident=True,
        )
        core.batch.open(cast(Any, compute), 0)
        self.models[name] = Model(name, Path(), core, cast(Any, Untold()))
        return self.models[name]

    def ask(self, *asked: tuple[Model, int, int]) -> list[Asked]:
        """All at once, between two turns."""
        made: list[Asked] = []
        self.loop.call(lambda: made.extend(Asked(self.loop, *one) for one in asked))
        return made


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.loop.close()


def fake(model: Model) -> Fake:
    return cast(Fake, model.core.compute)


def right(length: int) -> list[int]:
    return [(6 + i) % VOCAB for i in range(length)]


# Fairness


def test_seven_long_prompts_hold_a_running_row_for_no_longer_than_one(house: House) -> None:
    quick = house.add("quick")
    long = [house.add(f"long {i}") for i in range(7)]
    asked = house.ask((quick, 3, 100), *((model, 512, 2) for model in long))
    assert [one.wait().error for one in asked] == [None] * 8

    turns: list[dict[str, int]] = [{}]  # tokens of prompts by model, between two steps of `quick`
    begun = house.done.index(("quick", [1]))
    for name, counts in house.done[begun:]:
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


def test_short_prompts_of_several_models_share_a_turn(house: House) -> None:
    models = [house.add(str(i)) for i in range(4)]
    asked = house.ask(*((model, 16, 3) for model in models))
    assert [one.wait().ids for one in asked] == [right(3)] * 4
    assert [counts for _, counts in house.done[:4]] == [[16]] * 4


def test_a_prompt_goes_before_answers_that_only_go_on(house: House) -> None:
    """Also one that comes in the middle of a turn: it waits for one pass."""
    busy, late = [house.add(str(i)) for i in range(3)], house.add("late")
    house.ask((late, 3, 1))[0].wait()  # its last prompt is the newest of all from now on
    came: list[Asked] = []
    run = fake(busy[0]).run

    def run_and_ask(pieces: list[Piece]) -> NDArray[np.float32]:
        if not came and all((name, [3]) in house.done for name in "012"):
            came.append(Asked(house.loop, late, 3, 1))
        return run(pieces)

    fake(busy[0]).run = run_and_ask  # type: ignore[method-assign]
    asked = house.ask(*((model, 3, 20) for model in busy))
    assert [one.wait().ids for one in asked] == [right(20)] * 3
    assert came[0].wait().ids == right(1)
    steps = [name for name, _ in house.done]
    at = len(steps) - 1 - steps[::-1].index("late")
    assert steps[at - 1] == "0"


def test_a_model_that_cannot_compute_yet_still_ends_late_requests(house: House) -> None:
    model = house.add("m")
    model.core.resident = False
    (asked,) = house.ask((model, 3, 5))
    with house.loop.changed:
        asked.sequence.deadline = time.monotonic() + 0.01
        house.loop.changed.notify_all()
    assert isinstance(asked.wait().error, DeadlineExceeded)
    assert not house.done


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_what_a_prompt_gives_does_not_depend_on_who_computes_beside_it(
    tmp_path: Path, backend: str, new_engine: NewEngine
) -> None:
    folder = make_talkative(tmp_path / "m", max_length=448)
    engine = new_engine(backend=backend, memory_mib=256)
    engine.load("m", str(folder))
    encode = SentencePieceTokenizer(folder / "kogpt2.spiece").encode
    engine.load("other", str(folder))
    prompts = [prompt_of(encode, length) for length in (63, 130, 300)]

    def first(prompt: str) -> Any:
        return Request(engine, "m", prompt, max_new_tokens=1, logprobs=20)

    alone = [first(prompt).wait().tokens[0] for prompt in prompts]
    company = [
        Request(engine, name, prompt_of(encode, length), max_new_tokens=200)
        for name in ("m", "other")
        for length in (2, 40, 100)
    ]
    together = [first(prompt) for prompt in prompts]
    assert [request.wait().tokens[0] for request in together] == alone
    for request in company:
        engine.cancel(request.sequences)


# One row's failure


def break_sampling(asked: Asked, after: int) -> None:
    advance = asked.sequence.advance

    def broken(logits: Any) -> bool:
        if asked.sequence.num_new == after:
            raise ValueError("probabilities are NaN")
        return advance(logits)

    asked.sequence.advance = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [0, 3])
def test_a_row_that_cannot_go_on_ends_alone(house: House, after: int) -> None:
    model = house.add("m", max_rows=3)
    made: list[Asked] = []

    def ask() -> None:
        made.extend(Asked(house.loop, model, 5, 8) for _ in range(5))
        break_sampling(made[1], after)

    house.loop.call(ask)
    broken = made.pop(1).wait()
    assert broken.error is not None
    assert (broken.error.status, broken.error.message) == (500, "a step of m failed")
    assert [one.wait().ids for one in made] == [right(8)] * 4
    assert not house.lost


def test_a_prompt_without_memory_ends_alone(house: House) -> None:
    model = house.add("m", max_rows=2)
    fake(model).faults["prompt"] = OutOfMemory("there is no memory for 5 more tokens")
    first, second, *others = house.ask(*[(model, 5, 8)] * 4)
    assert isinstance(second.wait().error, OutOfMemory)  # the newest of the pass
    assert [one.wait().ids for one in (first, *others)] == [right(8)] * 3


def ask_for_several(house: House, model: Model, count: int, new: int = 8) -> list[Asked]:
    """Of one request: they have one prompt."""
    made: list[Asked] = []

    def ask() -> None:
        made.extend(Asked(house.loop, model, 5, new) for _ in range(count))
        for one in made:
            one.sequence.prompt = made[0].sequence.prompt
            one.sequence.parameters = Parameters(max_new_tokens=new, num_return_sequences=count)

    house.loop.call(ask)
    return made


def test_a_prompt_of_several_answers_that_fails_is_computed_for_the_next(house: House) -> None:
    model = house.add("m", max_rows=3)
    fake(model).faults["prompt"] = OutOfMemory("there is no memory for 5 more tokens")
    asked = ask_for_several(house, model, 4)
    errors = [type(one.wait().error) for one in asked]
    assert errors == [OutOfMemory] + [type(None)] * 3
    assert [one.ids for one in asked[1:]] == [right(8)] * 3
    assert not house.lost


def test_all_answers_begin_when_their_prompt_is_computed(house: House) -> None:
    """Also those for which there is no row yet."""
    model = house.add("m", max_rows=2)
    run, begun = fake(model).run, list[list[int]]()

    def run_and_look(pieces: list[Piece]) -> NDArray[np.float32]:
        begun.append([one.num_new for one in (*model.batch.running, *model.batch.waiting)])
        return run(pieces)

    fake(model).run = run_and_look  # type: ignore[method-assign]
    asked = ask_for_several(house, model, 4)
    assert [one.wait().ids for one in asked] == [right(8)] * 4
    assert begun[:2] == [[0] * 4, [1] * 4]


def test_answers_of_one_token_need_one_row(house: House) -> None:
    model = house.add("m", max_rows=1)
    asked = ask_for_several(house, model, 3, new=1)
    assert [one.wait().ids for one in asked] == [right(1)] * 3
    assert house.done == [("m", [5])]


def test_a_finished_answer_of_several_stays_finished(house: House) -> None:
    """One that failed during the pass that computes its prompt gets no token of it."""
    model = house.add("m")
    run, made = fake(model).run, list[Asked]()

    def run_and_fail(pieces: list[Piece]) -> NDArray[np.float32]:
        if not house.done:
            made[0].sequence.fail(EngineError("the client's own"))
        return run(pieces)

    fake(model).run = run_and_fail  # type: ignore[method-assign]

    def ask() -> None:
        made.extend(Asked(house.loop, model, 5, 3) for _ in range(2))

    house.loop.call(ask)
    assert made[1].wait().ids == right(3)
    assert (made[0].wait().ids, made[0].sequence.num_new) == ([], 0)


def test_a_row_that_cannot_be_opened_ends_its_sequence_alone(house: House) -> None:
    model = house.add("m")
    fake(model).faults["open_row"] = OutOfMemory("all pages are in use")
    asked = house.ask(*[(model, 5, 8)] * 3)
    assert [type(one.wait().error) for one in asked] == [OutOfMemory, type(None), type(None)]
    assert [one.ids for one in asked[1:]] == [right(8)] * 2
    assert house.budget.kv_bytes == 0


def test_a_step_without_memory_goes_on_with_one_row_less(house: House) -> None:
    model = house.add("m", max_rows=3)
    made: list[Asked] = []

    def fail_later(pieces: list[Piece]) -> NDArray[np.float32]:
        if len(pieces) == 3 and len(made[0].ids) == 2:
            fake(model).run = run  # type: ignore[method-assign]
            raise OutOfMemory("there is no memory for a step of 3 rows")
        return run(pieces)

    run = fake(model).run
    fake(model).run = fail_later  # type: ignore[method-assign]
    house.loop.call(lambda: made.extend(Asked(house.loop, model, 5, 8) for _ in range(4)))
    errors = [type(one.wait().error) for one in made]
    assert errors == [type(None)] * 2 + [OutOfMemory, type(None)]
    assert [one.ids for one in made if one.error is None] == [right(8)] * 3


def test_a_step_that_fails_ends_its_rows_and_not_the_queue(house: House) -> None:
    model = house.add("m", max_rows=2)
    fake(model).faults["run"] = RuntimeError("a fault")
    asked = house.ask(*[(model, 5, 8)] * 4)
    assert [one.wait().error is None for one in asked] == [False, False, True, True]
    assert not house.lost


@pytest.mark.parametrize("fault", ["open_row", "close_row"])
def test_a_batch_that_is_broken_loses_its_model_and_no_other(house: House, fault: str) -> None:
    model, other = house.add("m"), house.add("other")
    fake(model).faults[fault] = RuntimeError("a fault")
    asked = house.ask((model, 5, 3), (model, 5, 6), (other, 5, 8))
    assert asked[2].wait().ids == right(8)
    assert asked[1].wait().error is not None
    assert house.lost == ["m"]
    assert house.loop.health()["status"] == "ok"


def test_a_model_that_was_lost_is_loaded_anew(tmp_path: Path, new_engine: NewEngine) -> None:
    folder = make_talkative(tmp_path / "m")
    engine = new_engine(memory_mib=64)
    model = engine.load("m", str(folder))

    def broken() -> None:
        raise RuntimeError("a fault")

    model.batch.close_finished = broken  # type: ignore[method-assign]
    Request(engine, "m", "가", max_new_tokens=2).wait()
    until(lambda: not engine.models())
    with pytest.raises(ModelNotFound):
        Request(engine, "m", "가")
    until(lambda: (engine.budget.weight_bytes, engine.budget.kv_bytes) == (0, 0))
    engine.load("m", str(folder))
    assert len(Request(engine, "m", "가", max_new_tokens=4).wait().ids()) == 4


def test_one_that_cannot_be_told_keeps_no_other_from_going_on(house: House) -> None:
    model = house.add("m")

    def closed(_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    made: list[Asked] = []

    def ask() -> None:
        made.extend(Asked(house.loop, model, 5, 8) for _ in range(2))
        made[0].sequence.emit = closed
        made[0].sequence.deadline = 0

    house.loop.call(ask)
    assert made[1].wait().ids == right(8)


# Health


def test_a_loop_that_gets_on_is_well(house: House) -> None:
    assert house.loop.health() == {"status": "ok", "thread_alive": True, "step_age_s": 0.0}


def test_a_step_that_never_ends_is_told_and_a_long_one_is_none(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = house.add("m")
    reached, go_on = threading.Event(), threading.Event()

    def hold(tokens: Callable[..., Any]) -> Callable[..., Any]:
        def held(*arguments: Any) -> Any:
            reached.set()
            assert go_on.wait(WAIT_S)
            return tokens(*arguments)

        return held

    monkeypatch.setattr(model.core.compute, "run", hold(fake(model).run))
    (asked,) = house.ask((model, 5, 3))
    assert reached.wait(WAIT_S)
    assert house.loop.health()["status"] == "ok"
    monkeypatch.setattr(engine.step_loop, "STALLED_AFTER_S", 0.0)
    found = house.loop.health()
    assert (found["status"], found["thread_alive"]) == ("failed", True)
    assert found["step_age_s"] >= 0
    monkeypatch.undo()
    go_on.set()
    asked.wait()
    assert house.loop.health()["status"] == "ok"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_told_and_keeps_nobody_waiting(house: House) -> None:
    model = house.add("m")
    fake(model).faults["run"] = cast(Exception, SystemExit("a fault that is no Exception"))
    house.ask((model, 5, 3))
    until(lambda: not house.loop.health()["thread_alive"])
    assert house.loop.health()["status"] == "failed"
    with pytest.raises(EngineUnavailable, match="thread has ended"):
        house.loop.call(lambda: None)
