"""Evicts and reopens cores of models, so that those in use are resident in memory.

A core is opened on a thread that first reads its weights into memory, so no step waits for a disk.
Resident cores fit the budget and the memory that the container has free: with more, the kernel
would evict pages of one core while another computes.

Idle cores are evicted first, those with the fewest recent requests per byte before others. Their
files stay in the page cache until the kernel needs the memory. If every resident core is in use, a
core that has been queued for `DRAIN_AFTER_S` drains the core that has been resident for longest,
which then admits no sequences, finishes the running ones, is evicted and, if requests wait for it,
queued again. A queued core therefore waits for running answers only, never for new ones.

Large adapters, such as deltas, count as in memory from a request on, until they are parked in place
of a core by the same choice. Nothing waits for that: the files are mapped, and a parked one may be
read at any time. So those with running answers alone are never parked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor

from common.errors import EngineError
from common.eviction import Held, Victims
from common.memory import MIB, container_memory
from engine.backends.page_cache import advise_cold, read_in
from engine.budget import Budget
from engine.model import Core, Model, Residence
from engine.prefixes import Prefixes
from engine.sandbox.reading import Reading

# How long a core is queued before a core in use is drained for it. Longer: more time to the first
# token of models that are not resident. Shorter: more reads from the disk, fewer tokens a second.
DRAIN_AFTER_S = 0.25
# A core is resident for at least this many times as long as opening it took. Larger: less time goes
# into opening, and queued cores wait longer.
MIN_RESIDENCE_FACTOR = 4
# One part in so many of the container's memory stays free, for code and for memory that the budget
# does not count. Larger: the kernel evicts weights, and steps wait for the disk.
RESERVE_DIVISOR = 16
OPENING_THREADS = 2
# Smaller adapters do not count as in memory. Smaller: a thousand adapters of low rank, which the
# kernel evicts by itself, take the room of cached prefixes.
LARGE_ADAPTER_BYTES = 8 * MIB

logger = logging.getLogger(__name__)


class Residency:
    """Opens and evicts cores. Thread-safe: `changed` guards `cores` and their state."""

    def __init__(
        self,
        changed: threading.Condition,
        cores: Mapping[str, Core],
        budget: Budget,
        prefixes: Prefixes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed, self._cores, self._budget, self._clock = changed, cores, budget, clock
        self._prefixes = prefixes
        self._queue: deque[tuple[Core, Callable[[list[Core]], object], float]] = deque()
        self._pool = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="residency")
        self._adapters: dict[str, Model] = {}  # those with a large adapter that is not parked
        self._victims = Victims[Hashable]()  # names of cores, and (name,) of models with adapters
        self.opened = 0  # how many times an evicted core was opened again
        budget.on_kv_shortage = self._evict

    def used(self, model: Model) -> None:
        """Count a request that is about to be queued; queue its core, unless it is resident."""
        with self._changed:
            self._victims.used(model.core.name)
            self.request(model.core)
            self.take_adapter(model)

    def take_adapter(self, model: Model) -> None:
        """Count an adapter as in memory, if it is large; the caller reads it in after this."""
        with self._changed:
            adapter, core = model.adapter, model.core
            if adapter is None or adapter.num_bytes < LARGE_ADAPTER_BYTES:
                return
            if model not in core.models:  # it was unloaded
                return
            self._victims.used((model.name,))
            if model.name not in self._adapters:
                self._adapters[model.name], model.parked = model, False
                self._set_held_bytes(model, adapter.num_bytes)
                self._evict(self._budget.missing_bytes(0, core.row_bytes))

    def forget_adapter(self, model: Model) -> None:
        """Count an unloaded model's adapter no more."""
        with self._changed:
            if self._adapters.pop(model.name, None) is not None:
                self._set_held_bytes(model, 0)
                self.open_waiting()

    def request(self, core: Core) -> None:
        """Queue a core, unless it is resident; a thread opens it as soon as it fits."""
        with self._changed:
            self._enqueue_reopening(core)
            self.open_waiting()

    def open_new(self, core: Core, reading: Reading) -> None:
        """Wait until a new core fits, then open it. Raises `Cancelled`, `EngineError`."""
        granted: list[list[Core]] = []

        def grant(victims: list[Core]) -> None:
            granted.append(victims)
            self._changed.notify_all()

        with self._changed:
            self._victims.used(core.name)
            self._enqueue(core, grant)
            try:
                while True:
                    self.open_waiting()
                    if granted:
                        break
                    reading.check()
                    self._changed.wait(DRAIN_AFTER_S)
            except BaseException:
                self._dequeue(core)
                raise
        self._open(core, granted[0], reading)

    def dequeue(self, core: Core) -> None:
        """Take an unloaded core out of the queue, and wait until no thread opens or closes it."""
        with self._changed:
            self._dequeue(core)
            self._changed.wait_for(lambda: not core.moving)

    def close_core(self, core: Core) -> None:
        """Close an unloaded core at once, even if it has sequences."""
        with self._changed:
            compute, core.compute, core.residence = core.compute, None, Residence.EVICTED
        try:
            if compute is not None:
                compute.close()
        finally:
            with self._changed:
                self._set_held_bytes(core, 0)
                self.open_waiting()

    def close(self) -> None:
        self._pool.shutdown()

    def open_waiting(self) -> None:
        """Open queued cores in order, evicting idle ones, up to the first that does not fit."""
        with self._changed:
            while self._queue:
                core, start, since = self._queue[0]
                if core.moving:
                    return
                if self._cores.get(core.name) is core:  # opened again, if any request needs it
                    core.batch.drop_expired()
                    if core.idle:
                        self._queue.popleft()
                        continue
                missing = self._missing_bytes(core)
                if missing > 0 and self._closing_bytes() > 0:
                    return  # the end of the close calls this method again
                victims = self._choose_victims(missing)
                if victims is None:
                    if self._clock() - since >= DRAIN_AFTER_S:
                        self._drain(missing)
                    return
                self._queue.popleft()
                core.residence = Residence.OPENING
                self._set_held_bytes(core, core.reserved_bytes)
                start(victims)
            for core in self._cores.values():  # no core is queued, so none drains
                core.batch.admits = True

    # The methods below are called with the lock.

    def _enqueue_reopening(self, core: Core) -> None:
        known = self._cores.get(core.name) is core
        queued = any(queued is core for queued, _, _ in self._queue)
        open_already = core.residence in (Residence.OPENING, Residence.RESIDENT)
        if known and not (open_already or queued):
            self._enqueue(core, lambda victims: self._pool.submit(self._reopen, core, victims))

    def _enqueue(self, core: Core, start: Callable[[list[Core]], object]) -> None:
        self._queue.append((core, start, self._clock()))

    def _dequeue(self, core: Core) -> None:
        self._queue = deque(entry for entry in self._queue if entry[0] is not core)

    def _set_held_bytes(self, of: Core | Model, size: int) -> None:
        self._budget.take(size - of.held_bytes)
        of.held_bytes = size

    def _missing_bytes(self, core: Core) -> int:
        """Return how many bytes of other cores' weights must be evicted to open this core."""
        resident = [other for other in self._cores.values() if other.resident]
        row = max(other.row_bytes for other in (core, *resident))
        size = core.reserved_bytes - core.held_bytes
        missing = self._budget.missing_bytes(size, row)
        container = container_memory() if resident else None
        if container is not None:
            # Mapped weights are page cache, which `free_bytes` counts as free.
            adapters = sum(model.held_bytes for model in self._adapters.values())
            mapped = sum(other.reserved_bytes for other in resident if other.is_mapped) + adapters
            reserve = container.limit_bytes // RESERVE_DIVISOR
            shortage = size + mapped + reserve - container.free_bytes
            if shortage > 0:
                shortage -= self._prefixes.shrink(shortage)
            # It is enough to evict all others: one core is resident even in a small container.
            held = adapters + sum(other.held_bytes for other in resident)
            missing = max(missing, min(shortage, held))
        return missing

    def _closing_bytes(self) -> int:
        """Return the bytes that the budget counts only until closes under way have ended."""
        closing = (c for c in self._cores.values() if c.residence is Residence.CLOSING)
        return sum(core.held_bytes for core in closing)

    def _choose_victims(self, missing: int) -> list[Core] | None:
        """Mark idle cores with `missing` bytes as evicted; return them, or None if too few.

        Adapters are parked in place of some or all of them.
        """
        adapters: dict[Hashable, Model] = {
            (model.name,): model
            for model in self._adapters.values()
            if not model.submitting and not model.batch.num_running(model)
        }
        cores: dict[Hashable, Core] = {
            core.name: core
            for core in self._cores.values()
            # A draining core can be evicted once it has finished its last running sequence.
            if core.resident and (core.idle or not (core.batch.admits or core.batch.running))
        }
        units: dict[Hashable, Core | Model] = {**adapters, **cores}
        held = {key: Held(unit.held_bytes, 1) for key, unit in units.items()}
        if sum(entry.bytes for entry in held.values()) < missing:
            return None
        chosen = set(self._victims.choose(held, missing))
        for key, model in adapters.items():
            if key in chosen:
                self._park(model)
        victims = [core for name, core in cores.items() if name in chosen]
        for core in victims:
            core.residence = Residence.CLOSING
            core.batch.admits = True
            if core.is_mapped:  # a GPU's memory is free only after the close
                self._set_held_bytes(core, 0)
            if core.batch.has_work:
                self._enqueue_reopening(core)
        return victims

    def _park(self, model: Model) -> None:
        """Count an adapter as not in memory, and let the kernel evict it before others."""
        assert model.adapter is not None
        del self._adapters[model.name]
        model.parked = True
        self._set_held_bytes(model, 0)
        self._pool.submit(model.adapter.advise_cold)

    def _drain(self, missing: int) -> None:
        """Stop admission to the longest resident cores, until these have `missing` bytes."""
        now = self._clock()
        resident = [core for core in self._cores.values() if core.resident]
        for core in sorted(resident, key=lambda core: core.resident_since):
            # A core is drained only after the first request that it was opened for has begun.
            begun = core.batch.running or not core.batch.waiting
            if (
                missing > 0
                and begun
                and now - core.resident_since >= MIN_RESIDENCE_FACTOR * core.opening_s
            ):
                core.batch.admits = False
                missing -= core.held_bytes

    def _evict(self, missing: int) -> None:
        """Evict idle cores and park adapters to free `missing` bytes, if these have as many."""
        with self._changed:
            missing -= self._closing_bytes()
            for core in self._choose_victims(missing) or []:
                self._pool.submit(self._close, core)

    # The methods below are called without the lock, most on a thread of the pool.

    def _reopen(self, core: Core, victims: list[Core]) -> None:
        try:
            self._open(core, victims, Reading())
        except Exception as error:
            logger.exception("%s could not be opened again", core.name)
            known = error if isinstance(error, EngineError) else None
            with self._changed:
                core.batch.end(known or EngineError("the model could not be opened again"))
        else:
            self.opened += 1

    def _open(self, core: Core, victims: list[Core], reading: Reading) -> None:
        """Close the victims, then open a core in their space."""
        began, done = self._clock(), False
        try:
            for other in victims:
                self._close(other)
            core.compute = core.open(reading.run)
            read_in(core.compute.mapped)
            core.batch.open(core.compute, core.reserved_bytes)
            done = True
        finally:
            with self._changed:
                core.residence = Residence.RESIDENT if done else Residence.EVICTED
                if done:
                    core.resident_since = self._clock()
                    core.opening_s = core.resident_since - began
                else:
                    compute, core.compute = core.compute, None
                    if compute is not None:
                        compute.close()
                    self._set_held_bytes(core, 0)
                self._changed.notify_all()
                self.open_waiting()

    def _close(self, core: Core) -> None:
        """Close an evicted core."""
        with self._changed:
            compute, core.compute = core.compute, None
            core.batch.close()
        try:
            if compute is not None:
                advise_cold(compute.mapped)
                compute.close()
        except Exception:
            logger.exception("%s could not be closed", core.name)
        with self._changed:
            core.residence = Residence.EVICTED
            self._set_held_bytes(core, 0)
            self._changed.notify_all()
            self.open_waiting()
