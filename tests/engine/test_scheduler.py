"""Who gets a row, in what pieces a prompt is computed, and what becomes of the memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import DeadlineExceeded, EngineError, OutOfMemory
from common.parameters import Parameters
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel
from engine.backends.mxnet import model as mxnet_model
from engine.budget import Budget
from engine.prefixes import Prefixes
from engine.scheduler import Batch, Chunk
from engine.sequence import Sequence, State, Token
from tests.engine.models import make_artifact

CONTEXT = 512
VOCAB = 200
CHUNK = 64


class Bench:
    """A batch on a real small model, stepped by hand."""

    def __init__(
        self,
        path: Path,
        max_rows: int = 4,
        budget_tokens: int = 100_000,
        kept_tokens: int = 0,
        load: Callable[[Artifact], BackendModel] = mxnet_model.load,
    ) -> None:
        self.model = load(open_artifact(path))
        self.token_bytes = self.model.config.kv_bytes_per_token
        self.budget = Budget(budget_tokens * self.token_bytes)
        self.prefixes = Prefixes(kept_tokens * self.token_bytes, lambda: self.budget.free_bytes)
        self.budget.given = self.prefixes.shrink
        self.batch = Batch(max_rows, self.budget, CHUNK, self.prefixes)
        self.batch.open(self.model, 0)
        self.computed = 0  # tokens of prompts

    def queue(self, length: int, new: int = 4, seed: int = 0, **options: Any) -> Sequence:
        prompt = np.random.default_rng(seed).integers(4, VOCAB, length).tolist()
        return self.queue_prompt(prompt, new, **options)

    def queue_prompt(
        self, prompt: list[int], new: int = 4, answers: int = 1, **options: Any
    ) -> Sequence:
        emitted: list[Token | EngineError] = []
        sequence = Sequence(
            prompt=prompt,
            parameters=Parameters(max_new_tokens=new, num_return_sequences=answers),
            max_length=CONTEXT,
            stop_ids=frozenset(),
            emit=emitted.append,
            **options,
        )
        sequence.emitted = emitted  # type: ignore[attr-defined]
        self.batch.waiting.append(sequence)
        return sequence

    def step(self, room: int = CHUNK) -> list[Chunk]:
        """As the engine does it."""
        chunks = self.batch.schedule(room)
        for chunk in chunks:
            sequence = self.batch.rows[chunk.row]
            if chunk.source is None:
                logits = self.model.extend(chunk.row, np.array(chunk.ids))
                self.computed += len(chunk.ids)
                sequence.logits = logits if sequence.parameters.num_return_sequences > 1 else None
            else:
                self.batch.fill(chunk.row, chunk.source)
                if chunk.completes and chunk.source.row is not None:
                    logits = sequence.begin_like(self.batch.rows[chunk.source.row])
            if chunk.completes:
                sequence.state = State.DECODE
                self._advance(sequence, logits)
        self.batch.collect()
        running = self.batch.running()
        if running:
            rows = self.model.decode(np.array([s.ids[-1] for s in running]))
            for sequence, logits in zip(running, rows, strict=True):
                self._advance(sequence, logits)
            self.batch.collect()
        self.check()
        return chunks

    @staticmethod
    def _advance(sequence: Sequence, logits: Any) -> None:
        sequence.advance(logits)
        for token in sequence.take():
            sequence.tell(token)

    def check(self) -> None:
        """What holds between any two steps."""
        states = [s.state for s in self.batch.rows]
        assert State.PREFILL not in states[:-1]
        assert not set(states) & {State.WAITING, State.FINISHED}
        assert len(self.batch.rows) <= self.batch.max_rows
        for row, sequence in enumerate(self.batch.rows):
            if sequence.state is State.DECODE:
                assert self.model.length(row) == len(sequence.ids) - 1
        longest = [s.max_tokens for s in self.batch.rows]
        assert self.budget.kv_bytes == self.model.kv_bytes_for(longest) >= self.model.kv_bytes

    def run(self) -> None:
        for _ in range(2000):
            if not self.batch.has_work:
                return
            self.step()
        raise AssertionError("the batch was never done")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheduler") / "model"
    return make_artifact(folder, vocab=VOCAB, max_length=CONTEXT, units=32)


@pytest.fixture
def bench(path: Path) -> Bench:
    return Bench(path)


def error_of(sequence: Sequence) -> Any:
    return sequence.emitted[-1]  # type: ignore[attr-defined]


def test_a_short_prompt_is_computed_at_once(bench: Bench) -> None:
    sequence = bench.queue(5)
    (chunk,) = bench.step()
    assert (chunk.row, chunk.ids, chunk.completes) == (0, sequence.prompt, True)
    assert sequence.num_new == 2  # one from the prompt, one from the decode step


def test_several_short_prompts_start_in_one_step(bench: Bench) -> None:
    for seed in range(3):
        bench.queue(5, seed=seed)
    assert [chunk.row for chunk in bench.step()] == [0, 1, 2]


def test_a_long_prompt_is_computed_in_pieces(bench: Bench) -> None:
    sequence = bench.queue(CHUNK + 10)
    (first,) = bench.step()
    assert (len(first.ids), first.completes) == (CHUNK, False)
    assert sequence.state is State.PREFILL
    (second,) = bench.step()
    assert (len(second.ids), second.completes) == (10, True)
    assert first.ids + second.ids == sequence.prompt


def test_a_prompt_of_just_one_piece_is_complete(bench: Bench) -> None:
    bench.queue(CHUNK)
    assert [chunk.completes for chunk in bench.step()] == [True]


@pytest.mark.parametrize("company", [0, 1, 3])
def test_a_prompt_is_cut_at_the_same_places_whoever_computes_beside_it(
    bench: Bench, company: int
) -> None:
    for seed in range(company):
        bench.queue(3, new=50, seed=seed)
    bench.step()
    running = bench.batch.running()
    long = bench.queue(2 * CHUNK + 10)
    before = [sequence.num_new for sequence in running]
    sizes = []
    for room in (20, CHUNK, CHUNK - 1, CHUNK, 9, 10):
        sizes += [len(chunk.ids) for chunk in bench.step(room) if chunk.row == company]
    assert long.num_new > 0
    assert sizes == [CHUNK, CHUNK, 10]
    assert [sequence.num_new for sequence in running] == [n + 6 for n in before]


def test_nobody_starts_before_an_unfinished_prompt(bench: Bench) -> None:
    bench.queue(CHUNK + 10)
    late = bench.queue(5, seed=1)
    bench.step()
    assert late.state is State.WAITING
    rows = [chunk.row for chunk in bench.step()]
    assert rows == [0, 1]


def test_the_prompts_of_a_turn_are_no_longer_than_its_room(bench: Bench) -> None:
    for seed in range(4):
        bench.queue(30, seed=seed)
    assert [len(chunk.ids) for chunk in bench.step()] == [30, 30]
    assert [len(chunk.ids) for chunk in bench.step(29)] == []
    assert [len(chunk.ids) for chunk in bench.step()] == [30, 30]


@pytest.mark.parametrize("length", [5, CHUNK, CHUNK + 10])
def test_answers_to_one_prompt_have_it_computed_once(path: Path, length: int) -> None:
    bench = Bench(path, max_rows=6)
    alone = bench.queue(length, new=16)
    bench.run()
    other = bench.queue(3, new=50, seed=1)
    several = [bench.queue_prompt(alone.prompt, new=9 + i, answers=7) for i in range(7)]
    behind = bench.queue(3, new=9, seed=2)
    bench.computed = 0
    bench.run()
    assert bench.computed == 3 + length + 3
    assert [s.ids for s in several] == [alone.ids[: length + 9 + i] for i in range(7)]
    assert (other.num_new, behind.num_new) == (50, 9)


@pytest.mark.parametrize("new", [1, 2, 16])
def test_short_answers_to_one_prompt_have_it_computed_once(path: Path, new: int) -> None:
    """The first ends before there is room in a turn for the others."""
    bench = Bench(path, max_rows=8)
    prompt = bench.queue(2 * CHUNK, new=new, answers=8).prompt
    several = [bench.queue_prompt(prompt, new=new, answers=8) for _ in range(7)]
    bench.run()
    assert bench.computed == 2 * CHUNK
    assert len({tuple(sequence.ids) for sequence in several}) == 1


def test_answers_whose_rows_are_copied_take_of_a_turns_room(path: Path) -> None:
    bench = Bench(path, max_rows=12)
    prompt = bench.queue(320, new=30, answers=12).prompt
    for _ in range(11):
        bench.queue_prompt(prompt, new=30, answers=12)
    rows = []
    while bench.batch.waiting:
        bench.step()
        rows.append(len(bench.batch.rows))
    assert rows[:5] == [1, 1, 1, 1, 1]  # its pieces
    assert rows[5:] == [5, 9, 12]  # each copy takes what 20 tokens do


def test_prompts_start_in_the_order_of_the_queue(bench: Bench) -> None:
    queued = [bench.queue(5, new=3 + i, seed=i) for i in range(7)]
    started: list[Sequence] = []
    while bench.batch.has_work:
        bench.step()
        started += [s for s in queued if s.num_new and s not in started]
    assert started == queued


def test_no_more_rows_are_used_than_there_are(bench: Bench) -> None:
    for seed in range(9):
        bench.queue(5, seed=seed)
    bench.step()
    assert (len(bench.batch.rows), len(bench.batch.waiting)) == (4, 5)
    bench.run()


def test_a_row_that_ends_is_filled_at_the_next_step(bench: Bench) -> None:
    for seed, new in enumerate((3, 9, 9, 9)):
        bench.queue(5, new=new, seed=seed)
    late = bench.queue(5, seed=9)
    bench.step()
    assert late.state is State.WAITING
    bench.step()
    assert len(bench.batch.rows) == 3
    bench.step()
    assert late.state is State.DECODE


def test_all_memory_is_given_back_when_all_are_done(bench: Bench) -> None:
    for seed in range(9):
        bench.queue(1 + 40 * seed, new=2 + seed, seed=seed)
    bench.run()
    assert bench.budget.kv_bytes == 0
    assert bench.model.kv_bytes == 0


def test_memory_is_reserved_for_a_sequence_at_its_longest(bench: Bench) -> None:
    bench.queue(10, new=20)
    bench.step()
    assert bench.budget.kv_bytes == 64 * bench.token_bytes  # a block
    bench.queue(10, new=100_000)
    bench.step()
    assert bench.budget.kv_bytes == 2 * CONTEXT * bench.token_bytes  # each row has room for it


def test_a_sequence_waits_until_there_is_memory_for_it(path: Path) -> None:
    bench = Bench(path, budget_tokens=100)
    first, second = bench.queue(10, new=20), bench.queue(10, new=15, seed=1)
    bench.step()
    assert (first.state, second.state) == (State.DECODE, State.WAITING)
    bench.run()
    assert second.num_new == 15
    assert bench.budget.kv_bytes == 0


def test_a_sequence_that_could_never_have_memory_fails_at_once(path: Path) -> None:
    bench = Bench(path, budget_tokens=130)
    running = bench.queue(10, new=20)
    too_big, behind = bench.queue(10, new=121), bench.queue(10, new=10, seed=2)
    bench.step()
    assert isinstance(error_of(too_big), OutOfMemory)
    assert (running.state, behind.state) == (State.DECODE, State.DECODE)
    bench.run()
    assert (running.num_new, behind.num_new) == (20, 10)


def test_a_cancelled_sequence_is_gone_at_the_next_step_and_says_nothing(bench: Bench) -> None:
    running, other = bench.queue(5, new=50), bench.queue(5, new=50, seed=1)
    waiting = [bench.queue(5, seed=i) for i in range(4)]
    bench.step()
    said = len(running.emitted)  # type: ignore[attr-defined]
    running.cancelled = waiting[-1].cancelled = True
    bench.step()
    assert running not in bench.batch.rows
    assert waiting[-1] not in bench.batch.waiting
    assert len(running.emitted) == said  # type: ignore[attr-defined]
    assert other.state is State.DECODE


def test_a_sequence_that_is_late_fails_wherever_it_is(bench: Bench) -> None:
    in_time = bench.queue(5, new=50)
    prefilling = bench.queue(CHUNK, deadline=time.monotonic() + 3600)
    waiting = bench.queue(5, deadline=time.monotonic() + 3600)
    bench.step()
    assert (prefilling.state, waiting.state) == (State.PREFILL, State.WAITING)
    prefilling.deadline = waiting.deadline = time.monotonic()
    bench.step()
    assert isinstance(error_of(prefilling), DeadlineExceeded)
    assert isinstance(error_of(waiting), DeadlineExceeded)
    assert in_time.state is State.DECODE
    bench.run()
    assert in_time.num_new == 50


def test_clearing_a_batch_returns_who_was_not_finished_and_leaves_nothing(bench: Bench) -> None:
    queued = [bench.queue(5, new=50, seed=i) for i in range(6)]
    bench.step()
    assert bench.batch.clear() == queued
    assert not bench.batch.has_work
    assert bench.budget.kv_bytes == 0


def test_clearing_a_batch_needs_nothing_of_a_model_that_is_broken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = [bench.queue(5, new=50, seed=i) for i in range(6)]
    bench.step()

    def broken(*_: int) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(bench.model, "remove_last_row", broken)
    monkeypatch.setattr(bench.model, "move_row", broken)
    assert bench.batch.clear() == queued
    assert bench.budget.kv_bytes == 0


@pytest.mark.slow
def test_whoever_comes_and_goes_each_sequence_is_as_if_it_were_alone(path: Path) -> None:
    bench = Bench(path)
    rng = np.random.default_rng(17)
    lengths = [1, 2, 63, 64, 65, 200, 257, 400]
    alone: dict[tuple[int, int], list[int]] = {}

    def expected(length: int, seed: int, count: int) -> list[int]:
        if (length, seed) not in alone:
            sequence = single.queue(length, new=30, seed=seed)
            single.run()
            alone[length, seed] = sequence.ids[length:]
        return alone[length, seed][:count]

    single = Bench(path, max_rows=1)
    queued: list[tuple[Sequence, int, int]] = []
    for step in range(400):
        if len(queued) < 60 and rng.random() < 0.4:
            length, seed = int(rng.choice(lengths)), int(rng.integers(0, 3))
            new = int(rng.integers(1, 30))
            queued.append((bench.queue(length, new=new, seed=seed), length, seed))
        if rng.random() < 0.1 and bench.batch.rows:
            bench.batch.rows[rng.integers(len(bench.batch.rows))].cancelled = True
        bench.step()
        if step > 100 and not bench.batch.has_work and len(queued) == 60:
            break
    bench.run()

    cancelled = 0
    for sequence, length, seed in queued:
        new = sequence.ids[length:]
        cancelled += sequence.cancelled
        assert sequence.cancelled or len(new) == sequence.parameters.max_new_tokens
        assert new == expected(length, seed, len(new))
    assert 5 < cancelled < 40
    assert bench.budget.kv_bytes == 0
