"""Which sequences get a row, what a pass computes, and what becomes of the memory."""

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
from engine.budget import Budget
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.prefixes import Prefixes
from engine.scheduler import Batch, Scheduled
from engine.sequence import Sequence, State, Token
from tests.engine.models import make_artifact

CONTEXT = 512
VOCAB = 200
TURN = 64


def load_native(artifact: Artifact) -> BackendModel:
    return NativeModel(prepared(artifact, "int8", None))


class Bench:
    """A batch on a real small model, stepped by hand."""

    def __init__(
        self,
        path: Path,
        max_rows: int = 4,
        budget_tokens: int = 100_000,
        kept_tokens: int = 0,
        load: Callable[[Artifact], BackendModel] = load_native,
    ) -> None:
        self.model = load(open_artifact(path))
        self.token_bytes = self.model.kv_bytes_for([16]) // 16
        self.budget = Budget(budget_tokens * self.token_bytes)
        self.prefixes = Prefixes(kept_tokens * self.token_bytes, lambda: self.budget.free_bytes)
        self.budget.on_growth = self.prefixes.shrink
        self.batch = Batch(max_rows, self.budget, self.prefixes)
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

    def step(self, prefill_tokens: int = TURN) -> list[Scheduled]:
        """As the engine does it."""
        scheduled = self.batch.schedule(prefill_tokens)
        logits, at = self.model.run([part.piece for part in scheduled]), 0
        for part in scheduled:
            self.computed += part.num_prompt_tokens
            at += part.piece.num_logits
            sequence = part.sequence
            if part.completes:
                sequence.state = State.DECODE
                others = [] if sequence.num_new else self.batch.siblings(sequence)
                for one in (sequence, *others):
                    one.advance(logits[at - 1])
                    for token in one.take_tokens():
                        one.send(token)
        self.batch.close_finished()
        self.check()
        return scheduled

    def check(self) -> None:
        """What holds between any two steps."""
        running = self.batch.running
        states = [s.state for s in running]
        assert states.count(State.PREFILL) <= 1
        assert not set(states) & {State.WAITING, State.FINISHED}
        assert len(running) <= self.batch.max_rows
        assert self.budget.kv_bytes == self.model.kv_bytes_for([s.max_tokens for s in running])
        assert self.budget.kv_bytes >= self.model.kv_bytes - self.prefixes.num_bytes

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


def sizes(scheduled: list[Scheduled]) -> list[int]:
    return [len(part.piece.ids) for part in scheduled]


def test_prompts_and_running_rows_share_a_pass(bench: Bench) -> None:
    first = bench.queue(5, new=9)
    assert sizes(bench.step()) == [5]
    second, third = bench.queue(7, seed=1), bench.queue(3, seed=2)
    assert sizes(bench.step()) == [1, 7, 3]
    assert [s.num_new for s in (first, second, third)] == [2, 1, 1]


def test_a_long_prompt_is_cut_where_the_turn_ends(bench: Bench) -> None:
    running = bench.queue(3, new=50)
    bench.step()
    long = bench.queue(100, seed=1)
    cut = [sizes(bench.step(tokens)) for tokens in (30, 1, TURN, TURN)]
    assert cut == [[1, 30], [1, 1], [1, 64], [1, 5]]
    assert (long.num_new, running.num_new) == (1, 5)


def test_a_prompts_text_does_not_depend_on_where_it_is_cut(path: Path) -> None:
    texts = []
    for turns in ([TURN], [1], [63, 2, 17]):
        bench = Bench(path)
        sequence = bench.queue(150, new=20)
        for i in range(200):
            if not bench.batch.has_work:
                break
            bench.step(turns[i % len(turns)])
        texts.append(sequence.ids)
    assert texts[0] == texts[1] == texts[2]


def test_a_prompt_waits_for_an_unfinished_one(bench: Bench) -> None:
    bench.queue(TURN + 10)
    late = bench.queue(5, seed=1)
    assert sizes(bench.step()) == [TURN]
    assert late.state is State.WAITING
    assert sizes(bench.step()) == [10, 5]


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


def test_a_prompt_begins_with_what_a_running_row_has_computed(path: Path) -> None:
    """Its answer, too: a token is the same, computed alone or in a prompt."""
    bench = Bench(path, kept_tokens=1)
    first = bench.queue(40, new=30)
    for _ in range(8):
        bench.step()
    alone = bench.queue_prompt(first.ids[:45], new=6)
    bench.computed = 0
    bench.run()
    assert alone.cached_tokens == 44
    assert bench.computed == 0  # the last token takes a decode step
    assert alone.ids[45:51] == first.ids[45:51]


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
    assert (len(bench.batch.running), len(bench.batch.waiting)) == (4, 5)
    bench.run()


def test_all_memory_is_given_back_when_all_are_done(bench: Bench) -> None:
    for seed in range(9):
        bench.queue(1 + 40 * seed, new=2 + seed, seed=seed)
    bench.run()
    assert bench.budget.kv_bytes == 0
    assert bench.model.kv_bytes == 0


def test_memory_is_reserved_for_a_sequence_at_its_longest(bench: Bench) -> None:
    bench.queue(10, new=20)
    bench.step()
    assert bench.budget.kv_bytes == 32 * bench.token_bytes  # whole pages
    bench.queue(10, new=100_000)
    bench.step()
    assert bench.budget.kv_bytes == (32 + CONTEXT) * bench.token_bytes


def test_a_sequence_waits_until_there_is_memory_for_it(path: Path) -> None:
    bench = Bench(path, budget_tokens=50)
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


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones_of_another_model(
    path: Path,
) -> None:
    bench = Bench(path, budget_tokens=128)
    other = Batch(4, bench.budget, bench.prefixes)
    other.open(bench.model, 0)
    small = [bench.queue(10, new=20, seed=i) for i in range(3)]
    bench.batch.schedule(TURN)
    large = bench.queue(10, new=110, seed=9)
    bench.batch.waiting.remove(large)
    other.waiting.append(large)
    assert not other.schedule(TURN)  # three rows have 96 of 128 tokens
    late = bench.queue(10, new=20, seed=5)
    small[0].cancelled = True
    bench.batch.schedule(TURN)
    assert late.state is State.WAITING  # there is space for it, but it came later
    for sequence in small:
        sequence.cancelled = True
    bench.batch.schedule(TURN)
    assert [part.sequence for part in other.schedule(TURN)] == [large]
    large.cancelled = True
    other.drop_expired()
    assert [part.sequence for part in bench.batch.schedule(TURN)] == [late]


def test_a_request_that_gives_up_makes_no_other_wait(path: Path) -> None:
    bench = Bench(path, budget_tokens=128)
    other = Batch(4, bench.budget, bench.prefixes)
    other.open(bench.model, 0)
    running = bench.queue(10, new=20)
    bench.batch.schedule(TURN)
    large = bench.queue(10, new=110, seed=9)
    bench.batch.waiting.remove(large)
    other.waiting.append(large)
    other.schedule(TURN)
    large.cancelled = True
    other.drop_expired()
    late = bench.queue(10, new=20, seed=1)
    bench.batch.schedule(TURN)
    assert [running.state, late.state] == [State.PREFILL, State.PREFILL]


def test_a_cancelled_sequence_is_gone_at_the_next_step_and_emits_nothing(bench: Bench) -> None:
    running, other = bench.queue(5, new=50), bench.queue(5, new=50, seed=1)
    waiting = [bench.queue(5, seed=i) for i in range(4)]
    bench.step()
    emitted = len(running.emitted)  # type: ignore[attr-defined]
    running.cancelled = waiting[-1].cancelled = True
    bench.step()
    assert running not in bench.batch.running
    assert waiting[-1] not in bench.batch.waiting
    assert len(running.emitted) == emitted  # type: ignore[attr-defined]
    assert other.state is State.DECODE


def test_a_sequence_that_is_late_fails_wherever_it_is(bench: Bench) -> None:
    in_time = bench.queue(5, new=50)
    prefilling = bench.queue(TURN, deadline=time.monotonic() + 3600)
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


def test_clearing_a_batch_returns_unfinished_sequences_and_leaves_nothing(bench: Bench) -> None:
    queued = [bench.queue(5, new=50, seed=i) for i in range(6)]
    bench.step()
    assert bench.batch.clear() == queued
    assert not bench.batch.has_work
    assert bench.budget.kv_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("kept_tokens", [0, 5000])
def test_each_sequence_is_as_if_it_were_alone(path: Path, kept_tokens: int) -> None:
    bench = Bench(path, kept_tokens=kept_tokens)
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
        if rng.random() < 0.1 and bench.batch.running:
            running = bench.batch.running
            running[rng.integers(len(running))].cancelled = True
        bench.step(int(rng.integers(1, 100)))
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


def test_a_batch_has_work_until_it_needs_its_model_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the model of a batch without work."""
    bench.queue(5, new=1)
    seen: list[bool] = []
    for name in ("close_row", "kv_bytes_for"):
        real = getattr(bench.model, name)

        def noted(*arguments: Any, real: Any = real) -> Any:
            seen.append(bench.batch.has_work)
            return real(*arguments)

        monkeypatch.setattr(bench.model, name, noted)
    bench.batch.schedule(TURN)
    [sequence] = bench.batch.running
    sequence.state = State.FINISHED
    seen.clear()
    bench.batch.close_finished()
    assert seen == [True, True]
    assert not bench.batch.has_work
