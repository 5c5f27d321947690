"""Which sequences get a row, what a pass computes, and how memory is reserved and given back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import DeadlineExceeded, EngineError, ModelNotFound, OutOfMemory
from common.parameters import Parameters
from engine.artifacts.classifier import Classifier
from engine.artifacts.open import open_artifact
from engine.backends.interface import Row
from engine.budget import Budget
from engine.classification import Classification, EncodedText, Head
from engine.generation import Generation, TextSequence, Token
from engine.labels import Choice, Labels, Way
from engine.model import Core
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.prefixes import Prefixes
from engine.scheduler import MAX_TEXT_TOKENS, Batch
from engine.sequence import Sequence, State
from engine.step_loop import Loop
from tests.engine.engines import model_on
from tests.engine.models import make_artifact

CONTEXT = 512
VOCAB = 200
TURN = 64


class Bench:
    """A batch on a small real model, stepped one pass at a time."""

    def __init__(
        self, path: Path, max_rows: int = 4, budget_tokens: int = 100_000, cached_tokens: int = 0
    ) -> None:
        self.model = NativeModel(prepared(open_artifact(path), "int8", None))
        self.token_bytes = self.model.kv_bytes_for([16]) // 16
        self.budget = Budget(budget_tokens * self.token_bytes)
        self.prefixes = Prefixes(cached_tokens * self.token_bytes, lambda: self.budget.free_bytes)
        self.budget.on_growth = self.prefixes.shrink
        self.batch = Batch(max_rows, self.budget, self.prefixes)
        self.owner = model_on(self.model, self.batch)
        self.loop = Loop(threading.Condition(), fail)
        self.loop.close()  # without its thread
        self.computed = 0  # tokens of prompts

    def queue(self, length: int, new: int = 4, seed: int = 0, **options: Any) -> Sequence:
        prompt = np.random.default_rng(seed).integers(4, VOCAB, length).tolist()
        return self.queue_prompt(prompt, new, **options)

    def queue_prompt(
        self,
        prompt: list[int],
        new: int = 4,
        answers: int = 1,
        batch: Batch | None = None,
        **options: Any,
    ) -> Sequence:
        emitted: list[Token | EngineError] = []
        parameters = Parameters(max_new_tokens=new, num_return_sequences=answers)
        kind: type[TextSequence] = Choice if "labels" in options else Generation
        sequence = kind(
            prompt=prompt,
            parameters=parameters,
            max_length=CONTEXT,
            stop_ids=frozenset(),
            emit=emitted.append,
            model=self.owner,
            **options,
        )
        sequence.emitted = emitted  # type: ignore[attr-defined]
        (batch or self.batch).waiting.append(sequence)
        return sequence

    def queue_text(self, length: int, seed: int = 0) -> Sequence:
        """Queue a text to classify."""
        ids = np.random.default_rng(seed).integers(4, VOCAB, length).tolist()
        weight = np.ones((2, self.model.config.units), np.float32)
        head = Head(Classifier(("부정", "긍정")), weight)
        emitted: list[Any] = []
        sequence = Classification(
            prompt=ids,
            max_length=CONTEXT,
            emit=emitted.append,
            model=self.owner,
            head=head,
            encoded=EncodedText(ids),
        )
        sequence.emitted = emitted  # type: ignore[attr-defined]
        self.batch.waiting.append(sequence)
        return sequence

    def step(self, prefill_tokens: int = TURN, decodes: bool = False) -> list[int]:
        """Computes a pass; returns the tokens of its pieces."""
        scheduled = self.loop._step(self.owner.core, prefill_tokens, decodes)
        self.computed += sum(part.num_prompt_tokens for part in scheduled)
        self.check()
        return [len(part.piece.ids) for part in scheduled]

    def run_until(self, sequence: Sequence, state: State) -> None:
        for _ in range(100):
            if sequence.state is state:
                return
            self.step()
        raise AssertionError(f"the sequence is {sequence.state}")

    def check(self) -> None:
        """Check the invariants between any two steps."""
        running = self.batch.running
        states = [s.state for s in running]
        assert states.count(State.PREFILL) <= 1
        assert not set(states) & {State.WAITING, State.FINISHED}
        assert len(running) <= self.batch.max_rows
        assert self.budget.kv_bytes == self.model.kv_bytes_for([s.max_tokens for s in running])
        assert self.budget.kv_bytes >= self.model.kv_bytes - self.prefixes.num_bytes

    def run(self, *turns: int) -> None:
        for i in range(2000):
            if not self.batch.has_work:
                return
            self.step(turns[i % len(turns)] if turns else TURN)
        raise AssertionError("the batch was never done")


def fail(core: Core) -> None:
    raise AssertionError(f"a step of {core.name} failed")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheduler") / "model"
    return make_artifact(folder, vocab=VOCAB, max_length=CONTEXT, units=32)


@pytest.fixture
def bench(path: Path) -> Bench:
    return Bench(path)


def emitted(sequence: Sequence) -> list[Any]:
    return sequence.emitted  # type: ignore[attr-defined,no-any-return]


def states(*sequences: Sequence) -> list[State]:
    return [sequence.state for sequence in sequences]


def test_a_long_prompt_is_cut_where_the_turn_ends_and_the_next_one_waits(bench: Bench) -> None:
    running = bench.queue(3, new=50)
    bench.step()
    long, late = bench.queue(100, seed=1), bench.queue(5, seed=2)
    assert [bench.step(tokens) for tokens in (30, 1, TURN)] == [[1, 30], [1, 1], [1, 64]]
    assert late.state is State.WAITING
    assert bench.step() == [1, 5, 5]
    assert (long.num_new, late.num_new, running.num_new) == (1, 1, 5)


@pytest.mark.parametrize("length", [5, TURN, TURN + 10])
@pytest.mark.parametrize("new", [1, 2, 9])
def test_answers_to_one_prompt_have_it_computed_once(path: Path, length: int, new: int) -> None:
    bench = Bench(path, max_rows=8)
    alone = bench.queue(length, new=16)
    bench.run()
    several = [bench.queue_prompt(alone.prompt, new=new, answers=7) for _ in range(7)]
    bench.computed = 0
    bench.run()
    assert bench.computed == length
    assert [s.ids for s in several] == [alone.ids[: length + new]] * 7


def test_a_prompt_begins_with_the_tokens_that_a_running_row_has_computed(path: Path) -> None:
    """Those of its answer, too: a token is the same, computed alone or in a prompt."""
    bench = Bench(path, cached_tokens=1)
    first = bench.queue(40, new=30)
    for _ in range(8):
        bench.step()
    alone = bench.queue_prompt(first.ids[:45], new=6)
    bench.computed = 0
    bench.run()
    assert alone.cached_tokens == 44
    assert bench.computed == 0  # the last token takes a decode step
    assert alone.ids[45:51] == first.ids[45:51]


def test_prompts_start_in_the_order_of_the_queue_as_rows_get_free(bench: Bench) -> None:
    queued = [bench.queue(1 + 40 * i, new=3 + i, seed=i) for i in range(9)]
    started: list[Sequence] = []
    while bench.batch.has_work:
        bench.step()
        started += [s for s in queued if s.num_new and s not in started]
        assert len(bench.batch.running) <= 4
    assert started == queued
    assert (bench.budget.kv_bytes, bench.model.kv_bytes) == (0, 0)


def test_no_more_rows_run_than_the_backend_can_have(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting may be larger than a GPU's cache of rows."""
    monkeypatch.setattr(bench.model, "max_rows", 2)
    bench.batch.open(bench.model, 0)
    bench.batch.max_rows = 8  # as each load sets it anew
    queued = [bench.queue(5, seed=i) for i in range(4)]
    bench.step()
    assert bench.batch.running == queued[:2]
    bench.run()
    assert [sequence.num_new for sequence in queued] == [4] * 4


def test_a_sequence_waits_for_memory_or_fails_if_it_can_never_have_it(path: Path) -> None:
    bench = Bench(path, budget_tokens=130)
    first, large = bench.queue(10, new=60), bench.queue(10, new=80, seed=1)
    bench.step()
    assert states(first, large) == [State.DECODE, State.WAITING]
    bench.run()
    assert large.num_new == 80
    running = bench.queue(10, new=20)
    too_large, behind = bench.queue(10, new=121), bench.queue(10, new=10, seed=2)
    bench.step()
    assert isinstance(emitted(too_large)[-1], OutOfMemory)
    assert states(running, behind) == [State.DECODE, State.DECODE]
    bench.run()
    assert (running.num_new, behind.num_new) == (20, 10)
    assert bench.budget.kv_bytes == 0


@pytest.mark.parametrize("end", ["begun", "cancelled", "unloaded"])
def test_a_large_request_is_not_overtaken_by_another_models(path: Path, end: str) -> None:
    """Where there is memory for a later and smaller one, that waits until the large one has begun,
    has been cancelled, or its model was unloaded from a core that others share."""
    bench = Bench(path, budget_tokens=128)
    other = Batch(4, bench.budget, bench.prefixes)
    other.open(bench.model, 0)
    small = [bench.queue(10, new=20, seed=i) for i in range(3)]
    bench.batch.schedule(TURN)
    large = bench.queue(10, new=110, seed=9, batch=other)
    assert not other.schedule(TURN)  # three rows have 96 of 128 tokens
    late = bench.queue(10, new=20, seed=5)
    small[0].cancelled = True
    bench.batch.schedule(TURN)
    assert late.state is State.WAITING
    if end == "begun":
        for sequence in small:
            sequence.cancelled = True
        bench.batch.schedule(TURN)
        assert [part.sequence for part in other.schedule(TURN)] == [large]
    large.cancelled = end != "unloaded"
    if large.cancelled:
        other.drop_expired()
    else:
        other.end(ModelNotFound("m was unloaded"), bench.owner)
    assert late in [part.sequence for part in bench.batch.schedule(TURN)]


def test_a_cancelled_sequence_is_gone_at_the_next_step_and_emits_nothing(bench: Bench) -> None:
    running, other = bench.queue(5, new=50), bench.queue(5, new=50, seed=1)
    waiting = [bench.queue(5, seed=i) for i in range(4)]
    bench.step()
    before = len(emitted(running))
    running.cancelled = waiting[-1].cancelled = True
    bench.step()
    assert running not in bench.batch.running
    assert waiting[-1] not in bench.batch.waiting
    assert len(emitted(running)) == before
    assert other.state is State.DECODE


def test_a_sequence_past_its_deadline_fails_wherever_it_is(bench: Bench) -> None:
    in_time = bench.queue(5, new=50)
    late = [bench.queue(n, deadline=time.monotonic() + 3600) for n in (TURN, 5)]
    bench.step()
    assert states(*late) == [State.PREFILL, State.WAITING]
    for sequence in late:
        sequence.deadline = time.monotonic()
    bench.step()
    assert [type(emitted(sequence)[-1]) for sequence in late] == [DeadlineExceeded] * 2
    assert in_time.state is State.DECODE
    bench.run()
    assert in_time.num_new == 50


@pytest.mark.parametrize("alone", [True, False])
def test_an_unloaded_model_frees_everything_even_if_its_rows_cannot_be_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    bench = Bench(path, cached_tokens=1000)
    bench.queue(40, new=2)
    bench.run()
    assert bench.prefixes.num_bytes
    unloaded = [bench.queue(5, new=50, seed=i) for i in range(6)]
    bench.step()
    close_row = bench.model.close_row

    def broken(row: Row) -> None:
        close_row(row)
        raise RuntimeError("a fault")

    monkeypatch.setattr(bench.model, "close_row", broken)
    with pytest.raises(RuntimeError):
        bench.batch.end(ModelNotFound("m was unloaded"), None if alone else bench.owner)
    assert [type(emitted(sequence)[-1]) for sequence in unloaded] == [ModelNotFound] * 6
    assert not bench.batch.has_work
    assert (bench.budget.kv_bytes, bench.prefixes.num_bytes, bench.model.kv_bytes) == (0, 0, 0)


def test_texts_to_classify_take_few_tokens_of_passes_while_any_sequence_decodes(
    bench: Bench,
) -> None:
    texts = [bench.queue_text(40, seed) for seed in range(4)]
    assert bench.step() == [40, 24]  # as any prompts: nothing decodes
    assert bench.step(decodes=True) == [MAX_TEXT_TOKENS]  # of the second; another core decodes
    answer = bench.queue(60, new=20)
    bench.run_until(answer, State.DECODE)
    assert {text.state for text in texts} == {State.FINISHED}
    assert [len(emitted(text)) for text in texts] == [1] * 4
    half, most = MAX_TEXT_TOKENS // 2, MAX_TEXT_TOKENS
    more = [bench.queue_text(2 * most + half, seed) for seed in (5, 6)]
    prompt = bench.queue(60)
    steps = [bench.step(decodes=True) for _ in range(5)]
    assert steps == [[1, most], [1, most], [1, half, half], [1, most], [1, most]]
    assert states(*more) == [State.FINISHED] * 2
    assert bench.step(decodes=True) == [1, 60]  # of a prompt as many as before
    assert prompt.state is State.DECODE


def test_a_prompt_that_gets_no_row_leaves_those_of_the_labels_in_the_pass(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [Way(0, [10, 11, 12]), Way(1, [20, 21, 22]), Way(2, [30, 31, 32])]
    labels = Labels(("긍정", "부정", "중립"), ways)
    scored = bench.queue(20, labels=labels)
    bench.model.run([part.piece for part in bench.batch.schedule(TURN)])
    bench.batch.close_finished()
    without = bench.queue(5, seed=1)
    open_row = bench.model.open_row

    def short(source: Any = None, length: int = 0) -> Any:
        if not length:
            raise OutOfMemory("no memory for a row")
        return open_row(source, length)

    monkeypatch.setattr(bench.model, "open_row", short)
    scheduled = bench.batch.schedule(TURN)
    assert isinstance(emitted(without)[-1], OutOfMemory)
    assert [part.sequence for part in scheduled] == [scored] * 3
    assert [part.piece.row.length for part in scheduled] == [19] * 3
    bench.batch.close_finished()
    assert not bench.batch._pass_rows
