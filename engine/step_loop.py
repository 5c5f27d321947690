"""The one thread on which all models compute, turn by turn."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np

from common.errors import EngineError, EngineUnavailable, OutOfMemory
from engine.backends import nvidia
from engine.backends.interface import BackendModel, Logits
from engine.model import Model
from engine.prefixes import Prefix, Prefixes
from engine.scheduler import Chunk
from engine.sequence import Sequence, State

IDLE_S = 0.005
# So long nobody has wanted anything: whoever asks again as soon as there is an answer has no wait.
QUIET_S = 0.05
# Giving a row's memory back takes as long and keeps the interpreter's lock: answers go out before.
ANSWER_FIRST_S = 0.0005
# No step takes so long, a whole chunk of a prompt on a slow machine included.
STALLED_AFTER_S = 30.0
GPU_LOST = 75  # exit status

logger = logging.getLogger(__name__)


class Loop:
    """Takes turns as long as there is work. Thread-safe.

    In one turn each model that has work decodes once, and all of them together compute at most
    `prefill_tokens` of prompts: however many long prompts there are, that is what a running row
    waits for. `lost` is called, on the thread, with a model whose batch cannot go on.
    """

    def __init__(
        self,
        changed: threading.Condition,
        models: Mapping[str, Model],
        prefill_tokens: int,
        lost: Callable[[Model], None],
        turned: Callable[[], None] = lambda: None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`changed` guards `models` and what waits in their batches. `turned` is called after each
        turn: models may have answered their last. What is unfinished of `prefixes` is computed
        while there is nothing else to do."""
        self.changed = changed
        self._models, self._prefill_tokens, self._lost = models, prefill_tokens, lost
        self._turned, self._prefixes = turned, prefixes or Prefixes(0)
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False
        self._turns = 0
        self._step_began: float | None = None  # on time.monotonic(), while one is under way
        self.longest_step_s = 0.0  # of those that have ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

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
        quiet = False
        while True:
            with self.changed:
                wanted = self._unfinished()
                wait_s = None if wanted is None else 0 if quiet else QUIET_S
                quiet = not self.changed.wait_for(
                    lambda: self._closed or self._commands or self._busy(), wait_s
                )
                if quiet and wanted is not None:
                    wanted[0].batch.completing = True
                if self._closed and not self._commands:
                    return
                commands, self._commands = self._commands, deque()
                busy = bool(self._busy())
            if quiet and wanted is not None:
                self._complete(*wanted)
                continue
            for command in commands:
                with self._timed():
                    command()
            if not busy:
                continue
            worked = self._turn()
            self._turned()
            if not worked:  # all wait for memory that another thread holds
                time.sleep(IDLE_S)

    def _unfinished(self) -> tuple[Model, Prefix] | None:
        """What can be completed now."""
        found = self._prefixes.unfinished()
        models = {m.batch: m for m in self._models.values() if m.can_step} if found else {}
        return next(((models[p.owner], p) for p in found if p.owner in models), None)

    def _complete(self, model: Model, prefix: Prefix) -> None:
        try:
            with self._timed():
                model.batch.complete(prefix)
        except OutOfMemory:
            pass  # it is kept no longer
        except Exception as error:
            self._fault(model, error)
            self._lost(model)
        finally:
            model.batch.completing = False
        self._turned()

    def _busy(self) -> list[Model]:
        return [m for m in self._models.values() if m.batch.has_work and m.can_step]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._step_began = time.monotonic()
        try:
            yield
        finally:
            self._step_began = None
            self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)

    def _turn(self) -> bool:
        """A step of each that has work, and of those to whom it comes meanwhile. Says whether
        there was anything to do."""
        self._turns += 1
        with self.changed:  # those that wait for memory are asked for their clients, too
            for model in self._models.values():
                if model.batch.waiting and not model.can_step:
                    model.batch.drop()
        worked, room = False, self._prefill_tokens
        stepped: set[Model] = set()
        while True:
            with self.changed:  # who comes now waits for one step, not for all that are left
                left = [model for model in self._busy() if model not in stepped]
            if not left:
                return worked
            model = min(left, key=_order)
            stepped.add(model)
            try:
                with self._timed():
                    prefilled, decoded = self._step(model, room)
            except Exception as error:  # not of one row: of the batch itself
                self._fault(model, error)
                self._lost(model)
                continue
            room -= prefilled
            worked = worked or prefilled + decoded > 0

    def _step(self, model: Model, room: int) -> tuple[int, int]:
        """Schedule, run, postprocess. Says how many tokens of prompts and how many rows it were."""
        batch = model.batch
        with self.changed:  # the queue is shared with `submit`
            compute = model.compute
            if not model.can_step or compute is None:  # it had no rows and was moved just now
                return 0, 0
            chunks = batch.schedule(room)
        for chunk in chunks:
            self._prefill(model, compute, chunk)
        batch.collect()
        running = batch.running()
        if running:
            self._decode(model, running)
            if any(sequence.state is State.FINISHED for sequence in running):
                time.sleep(ANSWER_FIRST_S)
            batch.collect()
        return sum(chunk.cost for chunk in chunks), len(running)

    def _prefill(self, model: Model, compute: BackendModel, chunk: Chunk) -> None:
        batch, counters = model.batch, model.statistics
        sequence, source = batch.rows[chunk.row], chunk.source
        model.prefilled_at = self._turns
        if compute.length(chunk.row) == 0:
            counters.queue_s.observe(time.monotonic() - sequence.queued_at)
            counters.cached_tokens += sequence.cached_tokens
        with self._ending(model, sequence):
            if source is None:
                logits = compute.extend(chunk.row, np.array(chunk.ids))
                if sequence.is_scored:
                    sequence.score(logits)
                if chunk.completes and sequence.parameters.num_return_sequences > 1:
                    sequence.logits = logits
            else:
                batch.fill(chunk.row, source)
                if chunk.completes and source.row is not None:
                    logits = sequence.begin_like(batch.rows[source.row])
            if chunk.completes:
                sequence.state = State.DECODE
                if sequence.num_new == 0:
                    self._begin(model, sequence, logits)

    def _begin(self, model: Model, first: Sequence, logits: Logits) -> None:
        """Chooses the first token, and that of all other answers to the prompt: they need its
        logits (V,), and rows only for what follows."""
        with self.changed:  # the queue is shared with `submit`
            others = model.batch.others_to(first)
        told = []
        for sequence in (first, *others):
            with self._ending(model, sequence):
                if sequence is not first:
                    sequence.begin_like(first)
                waited_s = time.monotonic() - sequence.queued_at
                model.statistics.time_to_first_token_s.observe(waited_s)
                if sequence.advance(logits):
                    told.append(sequence)
        if told:
            model.texts.write(told)

    def _decode(self, model: Model, running: list[Sequence]) -> None:
        compute = model.compute
        assert compute is not None
        ids = np.array([sequence.ids[-1] for sequence in running])
        try:
            rows = compute.decode(ids)
        except Exception as error:
            failure = self._fault(model, error)
            whole = all(compute.length(i) == len(s.ids) - 1 for i, s in enumerate(running))
            # Where only memory was short and nothing is half done, one less may go on.
            fewer = whole and isinstance(error, OutOfMemory | MemoryError)
            newest = max(running, key=lambda sequence: sequence.queued_at)
            for sequence in [newest] if fewer else running:
                sequence.fail(failure)
            return
        model.statistics.steps += 1
        model.statistics.rows += len(running)
        told = []
        for sequence, logits in zip(running, rows, strict=True):
            with self._ending(model, sequence):
                if sequence.advance(logits):
                    told.append(sequence)
        if told:
            model.texts.write(told)

    @contextmanager
    def _ending(self, model: Model, sequence: Sequence) -> Iterator[None]:
        """What goes wrong inside ends this one, and nothing else."""
        try:
            yield
        except Exception as error:
            sequence.fail(self._fault(model, error))

    @staticmethod
    def _fault(model: Model, error: Exception) -> EngineError:
        """What to tell those whom an error ends."""
        logger.error("a step of %s failed", model.name, exc_info=error)
        if nvidia.is_fatal(str(error)):  # no later step can work: the supervisor starts anew
            os._exit(GPU_LOST)
        known = isinstance(error, EngineError)
        failure = error if known else EngineError(f"a step of {model.name} failed")
        assert isinstance(failure, EngineError)
        return failure


def _order(model: Model) -> tuple[bool, int]:
    """Prompts go before what only goes on; whose last prompt is the longest ago goes first, so that
    each gets its share of the room."""
    return not model.batch.has_prompts, model.prefilled_at
