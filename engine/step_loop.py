"""The one thread on which all models compute, turn by turn."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from common.errors import EngineError, EngineUnavailable, InvalidRequest, OutOfMemory
from engine.backends import nvidia
from engine.backends.interface import BackendModel, Logits
from engine.model import Core, Model
from engine.scheduler import Scheduled, next_deadline
from engine.sequence import Sequence, State

# Tokens of prompts in a turn, of all models together. While sequences run, so many are what their
# next tokens wait for: 64 take some 25 ms on two cores with a model of KoGPT2's size.
PREFILL_TOKENS = 64
PREFILL_TOKENS_ALONE = 256  # 10% less time for a long prompt
IDLE_S = 0.005
# Without work for so long, memory of past requests goes back to the operating system.
IDLE_BEFORE_RELEASE_S = 1.0
# No step takes so long, a whole chunk of a prompt on a slow machine included.
STALLED_AFTER_S = 30.0
GPU_LOST = 75  # exit status

logger = logging.getLogger(__name__)


class Loop:
    """Runs a pass of each model that has work, turn after turn. Thread-safe."""

    def __init__(
        self,
        changed: threading.Condition,
        lost: Callable[[Core], None],
        turned: Callable[[], None] = lambda: None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` guards what waits in the models' batches.

        `lost` is called, on the thread, with a model whose batch cannot go on; `turned` after each
        turn: models may have answered their last; `idle` once there has been no work for a second.
        """
        self.changed = changed
        self._lost, self._turned, self._idle = lost, turned, idle
        self._active: dict[Core, None] = {}  # those that may have work
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False
        self._turns = 0
        self._step_began: float | None = None  # on time.monotonic(), while one is under way
        self.longest_step_s = 0.0  # of those that have ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def add(self, model: Core) -> None:
        """Has a model take part until it has no work. Called with `changed`."""
        self._active[model] = None
        self.changed.notify_all()

    def call(self, command: Callable[[], None]) -> None:
        """Runs `command` between two turns and waits for it. Raises what it raises, and
        `EngineUnavailable` where the thread has ended."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                command()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        with self.changed:
            self._commands.append(run)
            self.changed.notify_all()
        while not done.done():
            self.check()
            wait([done], timeout=1)
        done.result()

    def check(self) -> None:
        """Raises `EngineUnavailable` where the thread has ended."""
        if not self._thread.is_alive():
            raise EngineUnavailable("the engine's thread has ended", retry_after_s=5)

    def health(self) -> dict[str, Any]:
        """`{"status": "ok" or "failed", "thread_alive", "step_age_s": of the step under way}`."""
        began, alive = self._step_began, self._thread.is_alive()
        age_s = 0.0 if began is None else time.monotonic() - began
        status = "ok" if alive and age_s < STALLED_AFTER_S else "failed"
        return {"status": status, "thread_alive": alive, "step_age_s": round(age_s, 3)}

    def close(self) -> None:
        """Ends the thread after the turn that is under way."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._thread.join()

    # On the thread

    def _run(self) -> None:
        released = False
        while True:
            with self.changed:
                if not self._changed_within(self._wait_s(released)):
                    self._drop_late()
                commands, self._commands = self._commands, deque()
                busy = bool(self._busy())
                if self._closed and not commands:
                    return
            for command in commands:
                with self._timed():
                    command()
            if busy:
                released = False
                worked = self._turn()
                self._turned()
                if not worked:  # all wait for memory that another thread or sequence holds
                    time.sleep(IDLE_S)
            elif not commands and not released and not self._active:
                released = True
                self._idle()

    def _wait_s(self, released: bool) -> float | None:
        """How long to wait for work: until a sequence that cannot be computed yet is too late."""
        deadline = next_deadline([model.batch for model in self._active])
        if deadline is not None:
            return max(0.0, deadline - time.monotonic())
        return None if released else IDLE_BEFORE_RELEASE_S

    def _changed_within(self, timeout_s: float | None) -> bool:
        return self.changed.wait_for(
            lambda: bool(self._closed or self._commands or self._busy()), timeout_s
        )

    def _drop_late(self) -> None:
        """Ends waiting sequences whose models are not resident, where that took too long."""
        for model in list(self._active):
            if not model.can_step:
                model.batch.drop()

    def _busy(self) -> list[Core]:
        for model in [m for m in self._active if not m.batch.has_work]:
            del self._active[model]
        return [model for model in self._active if model.can_step]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._step_began = time.monotonic()
        try:
            yield
        finally:
            self._step_began = None
            self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)

    def _turn(self) -> bool:
        """A pass of each model that has work, and of those that get some meanwhile. Returns whether
        there was anything to compute."""
        self._turns += 1
        with self.changed:
            self._drop_late()
            decodes = any(s.state is State.DECODE for m in self._busy() for s in m.batch.running)
        worked, prefill_tokens = False, PREFILL_TOKENS if decodes else PREFILL_TOKENS_ALONE
        stepped: set[Core] = set()
        while True:
            # a request that comes now waits for one pass, not for the whole turn
            with self.changed:
                left = [model for model in self._busy() if model not in stepped]
            if not left:
                return worked
            model = min(left, key=_order)
            stepped.add(model)
            try:
                with self._timed():
                    scheduled = self._step(model, prefill_tokens)
            except Exception as error:  # not of one sequence: of the batch itself
                self._fault(model, error)
                self._lost(model)
                continue
            prefill_tokens -= sum(part.num_prompt_tokens for part in scheduled)
            worked = worked or bool(scheduled)

    def _step(self, model: Core, prefill_tokens: int) -> list[Scheduled]:
        """Schedule, run, postprocess."""
        batch = model.batch
        with self.changed:  # the queue is shared with `submit`
            compute = model.compute
            if not model.can_step or compute is None:  # it had no rows and was moved just now
                return []
            scheduled = batch.schedule(prefill_tokens)
        for part in scheduled:
            if not part.sequence.begun:
                part.sequence.begun = True
                waited_s = time.monotonic() - part.sequence.queued_at
                _model(part.sequence).statistics.queue_s.observe(waited_s)
        if scheduled:
            logits = self._compute(model, compute, scheduled)
            if logits is not None:
                self._postprocess(model, scheduled, logits)
            batch.collect()
        return scheduled

    def _compute(
        self, model: Core, compute: BackendModel, scheduled: list[Scheduled]
    ) -> Logits | None:
        """The logits of a pass; none where it failed, and sequences with it."""
        lengths = [part.piece.row.length for part in scheduled]
        try:
            return compute.run([part.piece for part in scheduled])
        except Exception as error:
            failure = self._fault(model, error)
            unchanged = lengths == [part.piece.row.length for part in scheduled]
            # Where only memory was short and nothing is half done, one less may go on.
            fewer = unchanged and isinstance(error, OutOfMemory | MemoryError)
            sequences = [part.sequence for part in scheduled]
            for sequence in [max(sequences, key=_queued_at)] if fewer else sequences:
                sequence.fail(failure)
            return None

    def _postprocess(self, model: Core, scheduled: list[Scheduled], logits: Logits) -> None:
        """Chooses the next tokens from the logits (N, V) of a pass."""
        at = 0
        ready: list[Sequence] = []  # whose tokens are to be sent
        decoded: Counter[Model] = Counter()  # rows
        for part in scheduled:
            sequence, count = part.sequence, part.piece.num_logits
            rows, at = logits[at : at + count], at + count
            if part.num_prompt_tokens:
                model.prefilled_at = self._turns
            if sequence.state is State.FINISHED:
                continue
            with self._ending(model, sequence):
                if sequence.labels is not None:
                    if count:
                        model.batch.model.truncate(part.piece.row, len(sequence.prompt) - 1)
                        if sequence.score_label(rows):
                            self._count_first(sequence)
                            ready.append(sequence)
                    continue
                if sequence.scores_prompt:
                    for row in rows:
                        sequence.score(row)
                if not part.completes:
                    continue
                if sequence.state is State.DECODE:
                    decoded[_model(sequence)] += 1
                sequence.state = State.DECODE
                if not sequence.num_new:
                    self._begin(model, sequence, rows[-1], ready)
                elif self._advance(model, sequence, rows[-1 - len(sequence.guesses) :]):
                    ready.append(sequence)
        for owner, count in decoded.items():
            owner.statistics.steps += 1
            owner.statistics.rows += count
        for owner in dict.fromkeys(map(_model, ready)):
            owner.texts.write([s for s in ready if s.model is owner])

    @staticmethod
    def _advance(model: Core, sequence: Sequence, rows: Logits) -> bool:
        """Chooses the next token from the first of the logits (1 + guesses, V), and from each
        further one as long as the guess before it is the token that was chosen. Returns whether the
        tokens are to be sent now."""
        guesses, known = sequence.guesses, len(sequence.ids)
        due, accepted, chosen = False, 0, 0
        while accepted == chosen <= len(guesses) and sequence.state is not State.FINISHED:
            due = sequence.advance(rows[chosen]) or due
            chosen = len(sequence.ids) - known
            while accepted < min(chosen, len(guesses)) and (
                sequence.ids[known + accepted] == guesses[accepted]
            ):
                accepted += 1
        owner = _model(sequence)
        if guesses and sequence.guesser is not None:
            model.batch.take_back(sequence, known + accepted)
            sequence.guesser.check(len(guesses), accepted)
            owner.statistics.guessed_tokens += len(guesses)
            owner.statistics.accepted_tokens += accepted
        if sequence.guesser is not None and sequence.state is State.FINISHED:
            owner.recent.extend(sequence.ids[len(sequence.prompt) :])
        return due

    def _begin(self, model: Core, first: Sequence, logits: Logits, ready: list[Sequence]) -> None:
        """Chooses the first token of a sequence and of the other answers to its prompt: these need
        the same logits (V,), and rows only for what follows."""
        with self.changed:  # the queue is shared with `submit`
            siblings = model.batch.siblings(first)
        for sequence in (first, *siblings):
            with self._ending(model, sequence):
                if sequence is not first:
                    sequence.begin_like(first)
                self._count_first(sequence)
                if sequence.advance(logits):
                    ready.append(sequence)

    @staticmethod
    def _count_first(sequence: Sequence) -> None:
        """Counts a sequence that has its first token."""
        counters = _model(sequence).statistics
        counters.cached_tokens += sequence.cached_tokens
        counters.time_to_first_token_s.observe(time.monotonic() - sequence.queued_at)

    @contextmanager
    def _ending(self, model: Core, sequence: Sequence) -> Iterator[None]:
        """An error inside ends this sequence, and nothing else."""
        try:
            yield
        except InvalidRequest as error:  # of its form
            sequence.fail(error)
        except Exception as error:
            sequence.fail(self._fault(model, error))

    @staticmethod
    def _fault(model: Core, error: Exception) -> EngineError:
        """Logs an error and returns the one that its sequences fail with."""
        logger.error("a step of %s failed", model.name, exc_info=error)
        if nvidia.is_fatal(str(error)):  # no later step can work: the supervisor starts anew
            os._exit(GPU_LOST)
        known = isinstance(error, EngineError)
        failure = error if known else EngineError(f"a step of {model.name} failed")
        assert isinstance(failure, EngineError)
        return failure


def _order(model: Core) -> tuple[bool, int]:
    """Models with prompts first; among them the one whose prompts have waited for the most turns,
    so that each gets its share of the tokens."""
    return not model.batch.has_prompts, model.prefilled_at


def _model(sequence: Sequence) -> Model:
    model: Model = sequence.model
    return model


def _queued_at(sequence: Sequence) -> float:
    return sequence.queued_at
