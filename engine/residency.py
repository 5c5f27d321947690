"""Which of the loaded models are resident: open, in memory, able to compute.

A model becomes resident on a thread that opens it and reads what is not in memory: no step waits
for a disk. Never are more resident than the budget holds, or than what the container has left if
that is less: a model whose pages push out another one's is better off in a queue.

Idle models make space, the least recently used first. Their files' pages stay in the page cache as
long as the kernel has no other use for them. Where all resident models are in use, a model that
has waited for `PATIENCE_S` replaces the one that has been resident for longest: that one admits no
more sequences, finishes those that run, and queues up again. So a model waits for the running
answers of the models in its way and of those before it in the queue, and for nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from common.errors import EngineError
from common.eviction import Held, Victims
from common.memory import container_memory
from engine.backends.page_cache import advise_cold, read_in
from engine.budget import Budget
from engine.model import Core
from engine.prefixes import Prefixes
from engine.sandbox.reading import Reading

PATIENCE_S = 0.25
# A model in use stays resident for so many times as long as it took to open it.
STAY = 4
# Of a container: code, and what the budget does not count. If resident models had that, too, the
# kernel would take pages of theirs, and a step would wait for the disk.
KEPT_SHARE = 16
THREADS = 2

logger = logging.getLogger(__name__)


class Residency:
    """`changed` guards `models` and whether they are resident. Thread-safe."""

    def __init__(
        self,
        changed: threading.Condition,
        models: Mapping[str, Core],
        budget: Budget,
        prefixes: Prefixes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed, self._models, self._budget, self._clock = changed, models, budget, clock
        self._prefixes = prefixes
        self._queue: deque[tuple[Core, Callable[[list[Core]], object], float]] = deque()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="residency")
        self._victims = Victims[str]()
        self._draining: list[Core] = []  # that admit no sequences
        self.opened = 0  # how often a model became resident again
        budget.spare = self._spare

    def acquire(self, model: Core) -> None:
        """Counts a request that is about to be queued, and makes its model resident. `release` ends
        that."""
        with self._changed:
            self._victims.used(model.name)
            model.submitting += 1
            self.want(model)

    def release(self, model: Core) -> None:
        with self._changed:
            model.submitting -= 1
            self.advance()

    def want(self, model: Core) -> None:
        """Makes `model` resident as soon as there is space, on a thread."""
        with self._changed:
            self._queue_up(model)
            self.advance()

    def enter(self, model: Core, reading: Reading) -> None:
        """Makes a new model resident, on this thread, which waits for space.

        Raises `Cancelled` once the reading is given up, and what opening the model does.
        """
        granted: list[list[Core]] = []

        def grant(victims: list[Core]) -> None:
            granted.append(victims)
            self._changed.notify_all()

        with self._changed:
            self._victims.used(model.name)
            self._enqueue(model, grant)
            try:
                while True:
                    self.advance()
                    if granted:
                        break
                    reading.check()
                    self._changed.wait(PATIENCE_S)
            except BaseException:
                self._dequeue(model)
                raise
        self._open(model, granted[0], reading)

    def leave(self, model: Core) -> None:
        """Takes an unloaded model out of the queue, once no thread moves it."""
        with self._changed:
            self._dequeue(model)
            self._changed.wait_for(lambda: not model.moving)

    def free(self, model: Core) -> None:
        """Closes an unloaded model, whatever is still going on in it."""
        with self._changed:
            compute, model.compute, model.resident = model.compute, None, False
        try:
            if compute is not None:
                compute.close()
        finally:
            with self._changed:
                self._hold(model, 0)
                self.advance()

    def close(self) -> None:
        self._pool.shutdown()

    def advance(self) -> None:
        """Gives space to models that wait for it, in their order, as far as there is any."""
        with self._changed:
            while self._queue:
                model, start, since = self._queue[0]
                if model.moving:
                    return
                missing = self._lacks(model)
                victims = self._make_space(missing)
                if victims is None:
                    if self._clock() - since >= PATIENCE_S:
                        self._drain(missing)
                    return
                self._queue.popleft()
                model.opening = True
                self._hold(model, model.reserved_bytes)
                start(victims)
            for model in self._draining:
                model.batch.admits = True
            self._draining.clear()

    # With the lock

    def _queue_up(self, model: Core) -> None:
        known = self._models.get(model.name) is model
        queued = any(queued is model for queued, _, _ in self._queue)
        if known and not (model.can_step or model.opening or queued):
            self._enqueue(model, lambda victims: self._pool.submit(self._reopen, model, victims))

    def _enqueue(self, model: Core, start: Callable[[list[Core]], object]) -> None:
        self._queue.append((model, start, self._clock()))

    def _dequeue(self, model: Core) -> None:
        self._queue = deque(entry for entry in self._queue if entry[0] is not model)

    def _hold(self, model: Core, size: int) -> None:
        self._budget.take(size - model.held_bytes)
        model.held_bytes = size

    def _lacks(self, model: Core) -> int:
        """Bytes of other models' weights that have to go before `model` becomes resident."""
        resident = [m for m in self._models.values() if m.resident]
        row = max(m.row_bytes for m in (model, *resident))
        size = model.reserved_bytes - model.held_bytes
        missing = self._budget.lacks(size, row)
        container = container_memory() if resident else None
        if container is not None:
            mapped = sum(m.reserved_bytes for m in resident if m.is_mapped)  # is page cache
            kept = container.limit_bytes // KEPT_SHARE
            short = size + mapped + kept - container.free_bytes
            if short > 0:
                short -= self._prefixes.shrink(short)
            # One is always resident, however little there is.
            missing = max(missing, min(short, sum(m.held_bytes for m in resident)))
        return missing

    def _make_space(self, missing: int) -> list[Core] | None:
        """Chooses idle models with so many bytes of weights, the least recently used first; None if
        all of them would not do. The caller closes them: until then the memory is not there."""
        held = {
            model.name: Held(model.held_bytes, 1)
            for model in self._models.values()
            if model.can_step and (model.idle or _has_drained(model))
        }
        if sum(entry.bytes for entry in held.values()) < missing:
            return None
        victims = [self._models[name] for name in self._victims.choose(held, missing)]
        for model in victims:
            model.resident, model.closing = False, True
            model.batch.admits = True
            if model.is_mapped:  # a device's memory is free only once it is closed
                self._hold(model, 0)
            if model.batch.has_work:
                self._queue_up(model)
        return victims

    def _drain(self, missing: int) -> None:
        """Stops admission to models in use that hold so many bytes, those first that have been
        resident for longest; to none before it has begun what it was opened for."""
        now = self._clock()
        resident = [model for model in self._models.values() if model.can_step]
        for model in sorted(resident, key=lambda model: model.resident_since):
            begun = model.batch.running or not model.batch.waiting
            if missing > 0 and begun and now - model.resident_since >= STAY * model.opening_s:
                model.batch.admits = False
                self._draining.append(model)
                missing -= model.held_bytes

    def _spare(self, missing: int) -> None:
        with self._changed:
            for model in self._make_space(missing) or []:
                self._pool.submit(self._close, model)

    # On a thread, without the lock

    def _reopen(self, model: Core, victims: list[Core]) -> None:
        try:
            self._open(model, victims, Reading())
        except Exception as error:
            logger.exception("%s could not be opened again", model.name)
            known = error if isinstance(error, EngineError) else None
            with self._changed:
                for sequence in model.batch.clear():
                    sequence.fail(known or EngineError(f"{model.name} could not be opened again"))
        else:
            self.opened += 1

    def _open(self, model: Core, victims: list[Core], reading: Reading) -> None:
        """Makes a model resident that has its space, once the victims are closed."""
        began, done = self._clock(), False
        try:
            for other in victims:
                self._close(other)
            model.compute = model.open(reading.run)
            read_in(model.compute.mapped)
            model.batch.open(model.compute, model.reserved_bytes)
            done = True
        finally:
            with self._changed:
                model.opening = False
                if done:
                    model.resident = True
                    model.resident_since = self._clock()
                    model.opening_s = model.resident_since - began
                else:
                    compute, model.compute = model.compute, None
                    if compute is not None:
                        compute.close()
                    self._hold(model, 0)
                self._changed.notify_all()
                self.advance()

    def _close(self, model: Core) -> None:
        """Closes a victim."""
        with self._changed:
            compute, model.compute = model.compute, None
            model.batch.close()
        try:
            if compute is not None:
                advise_cold(compute.mapped)
                compute.close()
        except Exception:
            logger.exception("%s could not be closed", model.name)
        with self._changed:
            model.closing = False
            if not model.opening:
                self._hold(model, 0)
            self._changed.notify_all()
            self.advance()


def _has_drained(model: Core) -> bool:
    """Whether a model that admits no sequences has finished the last."""
    return not (model.batch.admits or model.batch.running)
