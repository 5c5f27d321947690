"""Turns are fair between models, and what goes wrong in one row ends that row alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import engine.step_loop
from common.errors import EngineError, EngineUnavailable, ModelNotFound, OutOfMemory
from common.memory import MIB
from common.parameters import Parameters
from engine.artifacts.config import GPT2Config
from engine.backends.interface import Kept
from engine.backends.page_cache import Span
from engine.budget import Budget
from engine.model import Model, Place
from engine.prefixes import Prefixes
from engine.registry import Engine
from engine.scheduler import Batch
from engine.sequence import Sequence, Token
from engine.settings import Settings
from engine.step_loop import Loop
from engine.text.sentencepiece import SentencePieceTokenizer
from tests.engine.engines import WAIT_S, Request, make_talkative, prompt_of, until

CHUNK = 64
VOCAB = 40


class Fake:
    """A backend that notes what it is asked for. After token i it finds i + 1 the likeliest."""

    config = GPT2Config(VOCAB, 8, 1, 1, 32, 1024)
    weight_bytes, kv_bytes_per_token, max_rows, kv_bytes = 0, 1, 32, 0
    mapped: ClassVar[list[Span]] = []
    piece, keeps = CHUNK, False

    def __init__(self, name: str, done: list[tuple[str, str, int]]) -> None:
        self.name, self.done = name, done
        self.lengths: list[int] = []
        self.faults: dict[str, Exception] = {}  # by method: raised once

    def _do(self, what: str, tokens: int = 0) -> None:
        if what in self.faults:
            raise self.faults.pop(what)
        if tokens:
            self.done.append((self.name, what, tokens))

    def _after(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.eye(VOCAB, dtype=np.float32)[(ids + 1) % VOCAB]

    def add_row(self) -> int:
        self._do("add_row")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def extend(self, row: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        self._do("extend", len(ids))
        self.lengths[row] += len(ids)
        found: NDArray[np.float32] = self._after(ids)[-1]
        return found

    def decode(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        self._do("decode", len(ids))
        for row in range(len(ids)):
            self.lengths[row] += 1
        return self._after(ids)

    def move_row(self, source: int, target: int) -> None:
        self._do("move_row")
        self.lengths[target] = self.lengths[source]

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._do("copy_row", length)
        self.lengths[target] = length

    def keep_row(self, row: int, length: int) -> Kept:
        raise NotImplementedError

    def fill_row(self, row: int, kept: Kept, length: int, last: bool) -> None:
        raise NotImplementedError

    def remove_last_row(self) -> None:
        self._do("remove_last_row")
        self.lengths.pop()

    def length(self, row: int) -> int:
        return self.lengths[row]

    def kv_bytes_for(self, lengths: Any) -> int:
        return sum(lengths)

    def close(self) -> None:
        self._do("close")


class Untold:
    """Stands in for `engine.text.process.Texts`: tells tokens at once and without a text."""

    def write(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            for token in sequence.take():
                sequence.tell(token)


class Asked:
    """A sequence in a model's queue, and what became of it."""

    def __init__(self, model: Model, length: int, new: int) -> None:
        self.ids: list[int] = []
        self.error: EngineError | None = None
        self.done = threading.Event()
        self.sequence = Sequence(
            prompt=[5] * length,
            parameters=Parameters(max_new_tokens=new),
            max_length=1024,
            stop_ids=frozenset(),
            emit=self._emit,
        )
        model.batch.waiting.append(self.sequence)

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
        self.done: list[tuple[str, str, int]] = []
        self.models: dict[str, Model] = {}
        self.lost: list[str] = []
        self.budget = Budget(MIB)
        self.loop = Loop(threading.Condition(), self.models, CHUNK, self._lose)

    def _lose(self, model: Model) -> None:
        del self.models[model.name]
        self.lost.append(model.name)
        for sequence in model.batch.clear():
            sequence.fail(EngineError("lost"))

    def add(self, name: str, max_rows: int = 8) -> Model:
        compute = Fake(name, self.done)
        model = Model(
            name=name,
            path=Path(),
            backend="fake",
            precision="",
            config=compute.config,
            open=lambda run: compute,
            texts=cast(Any, Untold()),
            batch=Batch(max_rows, self.budget, CHUNK, Prefixes(0)),
            reserved_bytes=0,
            compute=compute,
            place=Place.HOT,
        )
        model.batch.open(compute, 0)
        self.models[name] = model
        return model

    def ask(self, *asked: tuple[Model, int, int]) -> list[Asked]:
        """All at once, between two turns."""
        made: list[Asked] = []
        self.loop.call(lambda: made.extend(Asked(*one) for one in asked))
        return made


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.loop.close()


def fake(model: Model) -> Fake:
    assert isinstance(model.compute, Fake)
    return model.compute


def right(length: int) -> list[int]:
    return [(6 + i) % VOCAB for i in range(length)]


# Fairness


def test_seven_long_prompts_hold_a_running_row_for_no_longer_than_one(house: House) -> None:
    quick = house.add("quick")
    long = [house.add(f"long {i}") for i in range(7)]
    asked = house.ask((quick, 3, 100), *((model, 512, 2) for model in long))
    assert [one.wait().error for one in asked] == [None] * 8

    turns: list[dict[str, int]] = [{}]  # tokens of prompts by model, between two steps of `quick`
    for name, what, tokens in house.done[1:]:
        if name == "quick":
            turns.append({})
        elif what == "extend":
            turns[-1][name] = turns[-1].get(name, 0) + tokens
    assert sum(sum(turn.values()) for turn in turns) == 7 * 512
    assert max(sum(turn.values()) for turn in turns) <= CHUNK
    # And the seven get on together.
    progress = dict.fromkeys((model.name for model in long), 0)
    for turn in turns:
        for name, tokens in turn.items():
            progress[name] += tokens
        assert max(progress.values()) - min(progress.values()) <= CHUNK


def test_short_prompts_of_several_models_share_a_turn(house: House) -> None:
    models = [house.add(str(i)) for i in range(4)]
    asked = house.ask(*((model, 16, 3) for model in models))
    assert [one.wait().ids for one in asked] == [right(3)] * 4
    first = [what for _, what, _ in house.done[:8]]
    assert first.count("extend") == 4


def test_a_prompt_goes_before_answers_that_only_go_on(house: House) -> None:
    """Also one that comes in the middle of a turn: it waits for one step."""
    busy, late = [house.add(str(i)) for i in range(3)], house.add("late")
    house.ask((late, 3, 1))[0].wait()  # its last prompt is the newest of all from now on
    came: list[Asked] = []
    decode = fake(busy[0]).decode

    def decode_and_ask(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        if not came and all((name, "extend", 3) in house.done for name in "012"):
            came.append(Asked(late, 3, 1))
        return decode(ids)

    fake(busy[0]).decode = decode_and_ask  # type: ignore[method-assign]
    asked = house.ask(*((model, 3, 20) for model in busy))
    assert [one.wait().ids for one in asked] == [right(20)] * 3
    assert came[0].wait().ids == right(1)
    steps = [name for name, _, _ in house.done]
    at = len(steps) - 1 - steps[::-1].index("late")
    assert steps[at - 1] == "0"


@pytest.mark.parametrize("backend", ["mxnet", "onnxruntime"])
def test_what_a_prompt_gives_does_not_depend_on_who_computes_beside_it(
    tmp_path: Path, backend: str
) -> None:
    folder = make_talkative(tmp_path / "m", max_length=448)
    engine = Engine(Settings(backend=backend, memory_mib=256))
    try:
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
    finally:
        engine.close()


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
        made.extend(Asked(model, 5, 8) for _ in range(5))
        break_sampling(made[1], after)

    house.loop.call(ask)
    broken = made.pop(1).wait()
    assert broken.error is not None
    assert (broken.error.status, broken.error.message) == (500, "a step of m failed")
    assert [one.wait().ids for one in made] == [right(8)] * 4
    assert not house.lost


def test_a_prompt_without_memory_ends_alone(house: House) -> None:
    model = house.add("m", max_rows=2)
    fake(model).faults["extend"] = OutOfMemory("no room for 5 more tokens")
    first, *others = house.ask(*[(model, 5, 8)] * 4)
    assert isinstance(first.wait().error, OutOfMemory)
    assert [one.wait().ids for one in others] == [right(8)] * 3


def ask_for_several(house: House, model: Model, count: int, new: int = 8) -> list[Asked]:
    """Of one request: they have one prompt."""
    made: list[Asked] = []

    def ask() -> None:
        made.extend(Asked(model, 5, new) for _ in range(count))
        for one in made:
            one.sequence.prompt = made[0].sequence.prompt
            one.sequence.parameters = Parameters(max_new_tokens=new, num_return_sequences=count)

    house.loop.call(ask)
    return made


def test_a_prompt_of_several_answers_that_fails_ends_those_that_have_rows(house: House) -> None:
    model = house.add("m", max_rows=3)
    fake(model).faults["extend"] = OutOfMemory("no room for 5 more tokens")
    asked = ask_for_several(house, model, 4)
    errors = [type(one.wait().error) for one in asked]
    assert errors == [OutOfMemory] * 3 + [type(None)]
    assert asked[3].ids == right(8)
    assert not house.lost


@pytest.mark.parametrize(
    ("piece", "length", "chunks"),
    [(16, 64, [64]), (16, 65, [48, 17]), (16, 130, [64, 64, 2]), (64, 65, [64, 1])],
)
def test_no_token_is_left_alone_where_a_chunk_may_end_anywhere(
    house: House, piece: int, length: int, chunks: list[int]
) -> None:
    model = house.add("m")
    fake(model).piece = piece
    [one] = house.ask((model, length, 1))
    one.wait()
    assert [tokens for _, what, tokens in house.done if what == "extend"] == chunks


def test_all_answers_begin_when_their_prompt_is_computed(house: House) -> None:
    """Also those for which there is no row yet."""
    model = house.add("m", max_rows=2)
    decode, begun = fake(model).decode, list[list[int]]()

    def decode_and_look(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        begun.append([one.num_new for one in (*model.batch.rows, *model.batch.waiting)])
        return decode(ids)

    fake(model).decode = decode_and_look  # type: ignore[method-assign]
    asked = ask_for_several(house, model, 4)
    assert [one.wait().ids for one in asked] == [right(8)] * 4
    assert begun[0] == [1] * 4
    assert [what for _, what, _ in house.done].count("extend") == 2  # the first two had gone


def test_answers_of_one_token_need_one_row(house: House) -> None:
    model = house.add("m", max_rows=1)
    asked = ask_for_several(house, model, 3, new=1)
    assert [one.wait().ids for one in asked] == [right(1)] * 3
    assert [what for _, what, _ in house.done] == ["extend"]


def test_an_answer_whose_row_cannot_be_copied_ends_alone(house: House) -> None:
    model = house.add("m")
    fake(model).faults["copy_row"] = OutOfMemory("no room for copying a row")
    asked = ask_for_several(house, model, 3)
    assert [type(one.wait().error) for one in asked] == [type(None), OutOfMemory, type(None)]
    assert [one.ids for one in asked if one.error is None] == [right(8)] * 2
    assert [(what, n) for _, what, n in house.done if what == "copy_row"] == [("copy_row", 5)]


def test_a_step_without_memory_goes_on_with_one_row_less(house: House) -> None:
    model = house.add("m", max_rows=3)
    fake(model).faults["decode"] = OutOfMemory("no room for a step of 3 rows")
    asked = house.ask(*[(model, 5, 8)] * 4)
    errors = [one.wait().error for one in asked]
    assert [type(error) for error in errors] == [type(None)] * 2 + [OutOfMemory, type(None)]
    assert [one.ids for one in asked if one.error is None] == [right(8)] * 3


def test_a_step_that_fails_ends_its_rows_and_not_the_queue(house: House) -> None:
    model = house.add("m", max_rows=2)
    fake(model).faults["decode"] = RuntimeError("a fault")
    asked = house.ask(*[(model, 5, 8)] * 4)
    assert [one.wait().error is None for one in asked] == [False, False, True, True]
    assert not house.lost


@pytest.mark.parametrize("fault", ["add_row", "move_row", "remove_last_row"])
def test_a_batch_that_is_broken_loses_its_model_and_no_other(house: House, fault: str) -> None:
    model, other = house.add("m"), house.add("other")
    fake(model).faults[fault] = RuntimeError("a fault")
    asked = house.ask((model, 5, 3), (model, 5, 6), (other, 5, 8))
    assert asked[2].wait().ids == right(8)
    assert asked[1].wait().error is not None
    assert house.lost == ["m"]
    assert house.loop.health()["status"] == "ok"


def test_a_model_that_was_lost_is_loaded_anew(tmp_path: Path) -> None:
    folder = make_talkative(tmp_path / "m")
    engine = Engine(Settings(memory_mib=64))
    try:
        model = engine.load("m", str(folder))

        def broken() -> None:
            raise RuntimeError("a fault")

        model.compute.remove_last_row = broken  # type: ignore[method-assign]
        Request(engine, "m", "가", max_new_tokens=2).wait()
        until(lambda: not engine.models())
        with pytest.raises(ModelNotFound):
            Request(engine, "m", "가")
        until(lambda: (engine.budget.weight_bytes, engine.budget.kv_bytes) == (0, 0))
        engine.load("m", str(folder))
        assert len(Request(engine, "m", "가", max_new_tokens=4).wait().ids()) == 4
    finally:
        engine.close()


def test_one_that_cannot_be_told_keeps_no_other_from_going_on(house: House) -> None:
    model = house.add("m")

    def closed(_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    made: list[Asked] = []

    def ask() -> None:
        made.extend(Asked(model, 5, 8) for _ in range(2))
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

    monkeypatch.setattr(model.compute, "extend", hold(model.compute.extend))
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
    fake(model).faults["extend"] = cast(Exception, SystemExit("a fault that is no Exception"))
    house.ask((model, 5, 3))
    until(lambda: not house.loop.health()["thread_alive"])
    assert house.loop.health()["status"] == "failed"
    with pytest.raises(EngineUnavailable, match="thread has ended"):
        house.loop.call(lambda: None)
