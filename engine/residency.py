"""Which of the loaded models are in memory.

A model is made hot before it computes, by a thread that opens it where it is parked and reads what
is not in memory: no step waits for a disk. Never are more hot than the budget holds, or what the
container has left if that is less: whose turn would have to wait for pages that another one's turn
has just pushed out is better off in a queue.

Room is made by those that nobody uses, the coolest first. A mapped model becomes warm: its session
stays open, its pages are the kernel's to take. One whose memory is its own, or a warm one if that
does not do, is parked. Where all that are hot are in use, a model that has waited for `PATIENCE_S`
gets the place of the one that has been hot for longest: this takes no new requests, answers those
that it has begun, and queues up behind. So a model waits for the answers under way of those in its
way and of those before it in the queue, and for nothing else.
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
from engine.backends.page_cache import let_go, read_in
from engine.budget import Budget
from engine.model import Model, Place
from engine.prefixes import Prefixes
from engine.sandbox.reading import Reading

PATIENCE_S = 0.25
# A model stays hot for so many times as long as it took to make it hot, if it is in use.
STAY = 4
# Of a warm model's memory, what the kernel cannot take: 1.6 MB of the 149 of a full-size one, and
# what its requests left, which is 3 at most.
WARM_SHARE = 32
# An open model has some 55 mappings, and a process may have 65,530.
MOST_OPEN = 500
# Of a container: code, and what the budget does not know of. Where hot models have had that, too,
# the kernel takes pages of theirs, and a step waits for the disk.
KEPT_SHARE = 16
THREADS = 2

logger = logging.getLogger(__name__)


class Residency:
    """`changed` guards `models` and all that is said here of a model's place. Thread-safe."""

    def __init__(
        self,
        changed: threading.Condition,
        models: Mapping[str, Model],
        budget: Budget,
        prefixes: Prefixes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed, self._models, self._budget, self._clock = changed, models, budget, clock
        self._prefixes = prefixes
        self._queue: deque[tuple[Model, Callable[[list[Model]], object], float]] = deque()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="residency")
        self._victims = Victims[str]()
        self._dismissed: list[Model] = []  # that take no new requests
        self.heated = 0  # how often a model was made hot again
        budget.spare = self._spare

    def use(self, model: Model) -> None:
        """Says that somebody wants `model` to compute. `unuse` ends that."""
        with self._changed:
            self._victims.used(model.name)
            model.submitting += 1
            self.want(model)

    def unuse(self, model: Model) -> None:
        with self._changed:
            model.submitting -= 1
            self.advance()

    def want(self, model: Model) -> None:
        """Has `model` made hot as soon as there is room, on a thread."""
        with self._changed:
            self._queue_up(model)
            self.advance()

    def enter(self, model: Model, reading: Reading) -> None:
        """Makes a new model hot, on this thread, which waits for room.

        Raises `Cancelled` once the reading is given up, and what opening the model does.
        """
        room: list[list[Model]] = []
        with self._changed:
            self._victims.used(model.name)
            self._enqueue(model, room.append)
            try:
                while True:
                    self.advance()
                    if room:
                        break
                    reading.check()
                    self._changed.wait(PATIENCE_S)
            except BaseException:
                self._dequeue(model)
                raise
        self._open(model, room[0], reading)

    def leave(self, model: Model) -> None:
        """Takes a model that nobody can find any more out of the queue, once no thread moves it."""
        with self._changed:
            self._dequeue(model)
            self._changed.wait_for(lambda: not model.moving)

    def release(self, model: Model) -> None:
        """Frees its memory, whatever is still going on in it."""
        with self._changed:
            compute, model.compute, model.place = model.compute, None, Place.PARKED
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
        """Gives room to those that wait for it, in their order, as far as there is any."""
        with self._changed:
            while self._queue:
                model, start, since = self._queue[0]
                if model.moving:
                    return
                missing = self._lacks(model)
                victims = self._make_room(missing)
                if victims is None:
                    if self._clock() - since >= PATIENCE_S:
                        self._dismiss(missing)
                    return
                self._queue.popleft()
                model.moving = Place.HOT
                self._hold(model, model.reserved_bytes)
                start(victims)
            for model in self._dismissed:
                model.batch.admits = True
            self._dismissed.clear()

    # With the lock

    def _queue_up(self, model: Model) -> None:
        known = self._models.get(model.name) is model
        if known and model.place is not Place.HOT and not self._is_on_its_way(model):
            self._enqueue(model, lambda victims: self._pool.submit(self._heat_up, model, victims))

    def _enqueue(self, model: Model, start: Callable[[list[Model]], object]) -> None:
        self._queue.append((model, start, self._clock()))

    def _dequeue(self, model: Model) -> None:
        self._queue = deque(entry for entry in self._queue if entry[0] is not model)

    def _is_on_its_way(self, model: Model) -> bool:
        queued = any(queued is model for queued, _, _ in self._queue)
        return queued or model.moving is Place.HOT

    def _hold(self, model: Model, size: int) -> None:
        self._budget.take(size - model.held_bytes)
        model.held_bytes = size

    def _lacks(self, model: Model) -> int:
        hot = [m for m in self._models.values() if m.place is Place.HOT]
        row = max(m.row_bytes for m in (model, *hot))
        size = model.reserved_bytes - model.held_bytes
        missing = self._budget.lacks(size, row)
        container = container_memory() if hot else None
        if container is not None:
            mapped = sum(m.reserved_bytes for m in hot if _warm_bytes(m))  # is page cache
            kept = container.limit_bytes // KEPT_SHARE
            short = size + mapped + kept - container.free_bytes
            if short > 0:
                short -= self._prefixes.shrink(short)
            # One is always hot, however little there is.
            missing = max(missing, min(short, sum(m.held_bytes - _warm_bytes(m) for m in hot)))
        return missing

    def _unused(self, place: Place) -> list[Model]:
        """Those that are there and that nobody uses."""
        return [
            model
            for model in self._models.values()
            if model.place is place and not model.moving and (model.idle or _is_done(model))
        ]

    def _coolest(self, gains: Mapping[Model, int], missing: int) -> list[Model]:
        """Of models that would give so many bytes each, those that are needed least."""
        held = {model.name: Held(gain, 1) for model, gain in gains.items()}
        return [self._models[name] for name in self._victims.choose(held, missing)]

    def _make_room(self, missing: int) -> list[Model] | None:
        """Gives up so many bytes of weights, or None if all that nobody uses would not do.

        Whoever calls has those that it returns `_leave`: before, the memory is not there.
        """
        warm = {model: model.held_bytes for model in self._unused(Place.WARM)}
        hot = {model: model.held_bytes for model in self._unused(Place.HOT)}
        if sum(hot.values()) + sum(warm.values()) < missing:
            return None
        places: dict[Model, Place] = {}
        cooled = {model: held - _warm_bytes(model) for model, held in hot.items()}
        for model in self._coolest(cooled, missing):
            places[model] = Place.WARM if _warm_bytes(model) else Place.PARKED
            missing -= cooled[model]
            if places[model] is Place.WARM:
                warm[model] = _warm_bytes(model)
        for model in self._coolest(warm, missing):
            places[model] = Place.PARKED
        for model, place in places.items():
            self._cool(model, place)
        return list(places)

    def _cool(self, model: Model, place: Place) -> None:
        self._hold(model, _warm_bytes(model) if place is Place.WARM else 0)
        model.place = model.moving = place
        model.batch.admits = True
        if model.batch.has_work:
            self._queue_up(model)

    def _dismiss(self, missing: int) -> None:
        """Has models take no new requests that are in use and hold so many bytes; none that has
        not begun with those for which it was made hot."""
        now = self._clock()
        hot = [model for model in self._models.values() if model.can_step]
        for model in sorted(hot, key=lambda model: model.hot_since):
            begun = model.batch.rows or not model.batch.waiting
            if missing > 0 and begun and now - model.hot_since >= STAY * model.heating_s:
                model.batch.admits = False
                self._dismissed.append(model)
                missing -= model.held_bytes

    def _too_many_open(self) -> list[Model]:
        """Has some parked, by whoever calls, so that the process can have all its mappings."""
        count = sum(model.compute is not None for model in self._models.values())
        chosen = self._coolest(dict.fromkeys(self._unused(Place.WARM), 1), count - MOST_OPEN)
        for model in chosen:
            self._cool(model, Place.PARKED)
        return chosen

    def _spare(self, missing: int) -> None:
        with self._changed:
            for model in self._make_room(missing) or []:
                self._pool.submit(self._leave, model)

    # On a thread, without the lock

    def _heat_up(self, model: Model, victims: list[Model]) -> None:
        try:
            self._open(model, victims, Reading())
        except Exception as error:
            logger.exception("%s could not be opened again", model.name)
            known = error if isinstance(error, EngineError) else None
            with self._changed:
                for sequence in model.batch.clear():
                    sequence.fail(known or EngineError(f"{model.name} could not be opened again"))
        else:
            self.heated += 1

    def _open(self, model: Model, victims: list[Model], reading: Reading) -> None:
        """Makes a model hot that has its room, once those have left whose room it is."""
        began, hot = self._clock(), False
        try:
            for other in victims:
                self._leave(other)
            if model.compute is None:
                model.compute = model.open(reading.run)
                model.batch.open(model.compute, model.reserved_bytes)
            read_in(model.compute.mapped)
            hot = True
        finally:
            with self._changed:
                if hot:
                    model.place = Place.HOT
                    model.hot_since = self._clock()
                    model.heating_s = model.hot_since - began
                else:
                    self._hold(model, _warm_bytes(model))
                model.moving = None
                too_many = self._too_many_open()
                self._changed.notify_all()
                self.advance()
        for other in too_many:
            self._leave(other)

    def _leave(self, model: Model) -> None:
        """Has a model that was cooled give up its memory."""
        with self._changed:
            compute, parked = model.compute, model.place is Place.PARKED
            if compute is not None and parked:
                model.compute = None
                model.batch.close()
        try:
            if compute is not None and parked:
                compute.close()
            elif compute is not None:
                let_go(compute.mapped)
        except Exception:
            logger.exception("%s could not be closed", model.name)
        with self._changed:
            model.moving = None
            self._changed.notify_all()
            self.advance()


def _warm_bytes(model: Model) -> int:
    """What it holds while it is warm; 0 if it cannot be."""
    mapped = model.compute is not None and model.compute.mapped
    return model.reserved_bytes // WARM_SHARE if mapped else 0


def _is_done(model: Model) -> bool:
    """Whether a model that takes no new requests has answered the last."""
    return not (model.batch.admits or model.batch.rows)
