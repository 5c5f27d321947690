"""The step loop: one thread that computes a pass of each core in turn."""

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

from common.errors import ArtifactError, EngineError, EngineUnavailable, InvalidRequest, OutOfMemory
from engine.backends import nvidia
from engine.backends.interface import BackendModel, Logits, WeightsLost
from engine.model import Core, Model
from engine.sequence import Scheduled, Sequence, State
from engine.text.constraint import WAIT_S

# Most prompt tokens a turn while any sequence decodes. Larger: the next tokens of those come later
# (64 take 25 ms on two processors with a model of KoGPT2's size). Smaller: prompts take longer.
PREFILL_TOKENS = 64
PREFILL_TOKENS_ALONE = 256  # while no sequence decodes: a long prompt takes 10% less time
# How long the thread sleeps where all sequences wait for memory or masks. Longer: later tokens.
# Shorter: more processor time for polling.
POLL_INTERVAL_S = 0.005
# Idle time after which memory of finished requests is returned to the operating system. Shorter:
# more page faults in the next requests.
IDLE_BEFORE_RELEASE_S = 1.0
# The age of a step from which on the engine is unhealthy. A step of 256 prompt tokens on a slow
# machine takes a few seconds.
STALLED_AFTER_S = 30.0
GPU_LOST = 75  # exit status after a fatal error of the GPU

logger = logging.getLogger(__name__)


class Loop:
    """Runs a pass of each core that has work, turn after turn. Thread-safe."""

    def __init__(
        self,
        changed: threading.Condition,
        on_fault: Callable[[Core, Exception], None],
        after_turn: Callable[[], None] = lambda: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread. `changed` guards the queues of the batches.

        The thread calls `on_fault` with a core whose pass failed as a whole, `after_turn` after
        each turn, and `on_idle` once there has been no work for `IDLE_BEFORE_RELEASE_S`.
        """
        self.changed = changed
        self._on_fault, self._after_turn, self._on_idle = on_fault, after_turn, on_idle
        self._active: dict[Core, None] = {}  # the cores that may have work, in order
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False
        self._turns = 0
        self._step_began: float | None = None  # on time.monotonic(), of the step under way
        self.longest_step_s = 0.0  # of all steps that have ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def add(self, core: Core) -> None:
        """Compute a core in each turn until it has no work. The caller holds `changed`."""
        self._active[core] = None
        self.changed.notify_all()

    def call(self, command: Callable[[], None]) -> None:
        """Run `command` between two turns and wait. Raises its errors and `EngineUnavailable`."""
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
        """Raise `EngineUnavailable` if the thread has ended."""
        if not self._thread.is_alive():
            raise EngineUnavailable("the engine's thread has ended", retry_after_s=5)

    def health(self) -> dict[str, Any]:
        """Return `{"status": "ok" or "failed", "thread_alive", "step_age_s"}`; 0 between steps."""
        began, alive = self._step_began, self._thread.is_alive()
        age_s = 0.0 if began is None else time.monotonic() - began
        status = "ok" if alive and age_s < STALLED_AFTER_S else "failed"
        return {"status": status, "thread_alive": alive, "step_age_s": round(age_s, 3)}

    def close(self) -> None:
        """End the thread after the current turn."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._thread.join()

    # The methods below run on the thread.

    def _run(self) -> None:
        released = False
        while True:
            with self.changed:
                idle = False
                if not self._has_work():  # a new request may have an earlier deadline
                    idle = not self.changed.wait(self._wait_s(released))
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
                self._after_turn()
                if not worked:
                    self._pause()
            elif idle and not released and not self._active:
                released = True
                self._on_idle()

    def _wait_s(self, released: bool) -> float | None:
        """Return how long to wait for work, at most until the next deadline in the queues."""
        waiting = (sequence for core in self._active for sequence in core.batch.waiting)
        if deadlines := [s.deadline for s in waiting if s.deadline is not None]:
            return max(0.0, min(deadlines) - time.monotonic())
        return None if released else IDLE_BEFORE_RELEASE_S

    def _has_work(self) -> bool:
        return bool(self._closed or self._commands or self._busy())

    def _drop_late(self) -> None:
        """Fail queued sequences past their deadlines, on cores that cannot step."""
        for core in list(self._active):
            if not core.resident:
                core.batch.drop_expired()

    def _busy(self) -> list[Core]:
        for core in [m for m in self._active if not m.batch.has_work]:
            del self._active[core]
        return [core for core in self._active if core.resident]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._step_began = time.monotonic()
        try:
            yield
        finally:
            self._step_began = None
            self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)

    def _pause(self) -> None:
        """Wait where all wait for memory that another thread or sequence holds, or for masks."""
        with self.changed:
            blocked = [s for core in self._busy() for s in core.batch.blocked()]
        if blocked:
            blocked[0].wait(POLL_INTERVAL_S)
        else:
            time.sleep(POLL_INTERVAL_S)

    def _turn(self) -> bool:
        """Compute a pass of each core with work; returns whether there was anything to compute."""
        self._turns += 1
        with self.changed:
            self._drop_late()
            decodes = any(s.state is State.DECODE for m in self._busy() for s in m.batch.running)
        worked, prefill_tokens = False, PREFILL_TOKENS if decodes else PREFILL_TOKENS_ALONE
        stepped: set[Core] = set()
        while True:
            # Chosen after each pass, so that a new request waits for one pass, not for the turn.
            with self.changed:
                remaining = [core for core in self._busy() if core not in stepped]
            if not remaining:
                return worked
            core = min(remaining, key=_order)
            stepped.add(core)
            try:
                with self._timed():
                    scheduled = self._step(core, prefill_tokens, decodes)
            except Exception as error:  # of the whole batch, not of one sequence
                self._fault(core, error)
                self._on_fault(core, error)
                continue
            prefill_tokens -= sum(part.num_prompt_tokens for part in scheduled)
            worked = worked or bool(scheduled)

    def _step(self, core: Core, prefill_tokens: int, decodes: bool = False) -> list[Scheduled]:
        """Schedule, run and postprocess one pass of a core."""
        batch = core.batch
        self._settle(core, 0)
        with self.changed:  # the queue is shared with `submit`
            compute = core.compute
            if not core.resident or compute is None:  # it was evicted just now
                return []
            scheduled = batch.schedule(prefill_tokens, decodes)
        for part in scheduled:
            if not part.sequence.begun:
                part.sequence.begun = True
                waited_s = time.monotonic() - part.sequence.queued_at
                statistics = part.sequence.model.statistics
                statistics.queue_s.observe(waited_s)
                statistics.cached_tokens += part.sequence.cached_tokens
        if scheduled:
            logits = self._compute(core, compute, scheduled)
            if logits is not None:
                self._postprocess(core, scheduled, logits)
            with self.changed:
                batch.close_finished()
        return scheduled

    def _compute(
        self, core: Core, compute: BackendModel, scheduled: list[Scheduled]
    ) -> Logits | None:
        """Compute a pass; return its logits, or fail its sequences and return None.

        Raises `WeightsLost`.
        """
        lengths = [part.piece.row.length for part in scheduled]
        try:
            return compute.run([part.piece for part in scheduled])
        except WeightsLost:
            raise
        except Exception as error:
            failure = self._fault(core, error)
            unchanged = lengths == [part.piece.row.length for part in scheduled]
            # If memory was short and no row has changed, a pass without the newest may succeed.
            fewer = unchanged and isinstance(error, OutOfMemory | MemoryError)
            sequences = [part.sequence for part in scheduled]
            for sequence in [max(sequences, key=lambda s: s.queued_at)] if fewer else sequences:
                sequence.fail(failure)
            return None

    def _postprocess(self, core: Core, scheduled: list[Scheduled], logits: Logits) -> None:
        """Give the logits (N, V) of a pass to its sequences."""
        at = 0
        ready: list[Sequence] = []  # sequences whose tokens are to be sent
        decoded: Counter[Model] = Counter()  # rows by model
        for part in scheduled:
            sequence, count = part.sequence, part.piece.num_logits
            vocab_size = part.piece.vocab_size(core.config)
            rows, at = logits[at : at + count, :vocab_size], at + count
            if part.num_prompt_tokens:
                core.prefilled_at = self._turns
            if sequence.state is State.FINISHED:
                continue
            siblings: list[Sequence] = []
            if part.completes:
                decoded[sequence.model] += sequence.state is State.DECODE
                sequence.state = State.DECODE
                if not sequence.num_new:
                    with self.changed:  # the queue is shared with `submit`
                        siblings = core.batch.siblings(sequence)
            with self._ending(core, sequence):
                if sequence.take(part, rows, core.batch.model):
                    ready.append(sequence)
            for sibling in siblings:
                with self._ending(core, sibling):
                    if sibling.begin_like(sequence, rows[-1]):
                        ready.append(sibling)
        for owner, count in (+decoded).items():
            owner.statistics.steps += 1
            owner.statistics.rows += count
        self._write(ready)
        self._settle(core, WAIT_S)

    def _settle(self, core: Core, timeout_s: float) -> None:
        """End the blocks of sequences, for which it waits up to `timeout_s`."""
        with self.changed:  # the queue is shared with `submit`
            blocked = core.batch.blocked()
        ready, until = list[Sequence](), time.monotonic() + timeout_s
        for sequence in blocked:
            with self._ending(core, sequence):
                if sequence.settle(max(0.0, until - time.monotonic())):
                    ready.append(sequence)
        self._write(ready)

    @staticmethod
    def _write(ready: list[Sequence]) -> None:
        """Send the texts of sequences' new tokens."""
        for owner in dict.fromkeys(s.model for s in ready):
            owner.texts.write([s for s in ready if s.model is owner])

    @contextmanager
    def _ending(self, core: Core, sequence: Sequence) -> Iterator[None]:
        """Fail only this sequence if the block raises an error."""
        try:
            yield
        except (ArtifactError, InvalidRequest) as error:  # from the weights, the request's form
            sequence.fail(error)
        except Exception as error:
            sequence.fail(self._fault(core, error))

    @staticmethod
    def _fault(core: Core, error: Exception) -> EngineError:
        """Log an error and return the one that the sequences fail with."""
        logger.error("a step of %s failed", core.name, exc_info=error)
        if nvidia.is_fatal(str(error)):  # no later step can work; the supervisor restarts it
            os._exit(GPU_LOST)
        if isinstance(error, EngineError):
            return error
        return EngineError("a step of the model failed")


def _order(core: Core) -> tuple[bool, int]:
    """Return a sort key: cores with prompts first, the one that prefilled longest ago first."""
    return not core.batch.has_prompts, core.prefilled_at
