"""Which models stay loaded: which make room for another, and which have been idle for too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from common.errors import NeverFits, OutOfMemory
from common.eviction import Held, Victims
from serving.errors import DiskFull, InsufficientStorage
from serving.mms.workers import Workers
from serving.models.model import LOAD_S, Model, State
from serving.models.registry import Registry, Step
from serving.store.disk import size_bytes

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.02
IDLE_LOOK_S = 1.0
# So long after it last had two requests at once a model keeps one connection of MMS's: sixteen of
# them cost it 4 MB.
ONE_CONNECTION_S = 30.0

Shortage = InsufficientStorage | OutOfMemory


class Residency:
    """Unloads those models of `registry` that are worth the least per byte, never a pinned one.

    Several loads make room at once, each for itself: what one has had unloaded is promised to it.
    """

    def __init__(
        self,
        registry: Registry,
        workers: Workers,
        observe: Callable[[str, Model, float], None] = lambda event, model, seconds: None,
    ) -> None:
        self._registry, self._workers, self._observe = registry, workers, observe
        self._victims = Victims[str]()
        self._wanted: Counter[str] = Counter()  # requests that have not begun to use their model
        self._waiting: set[str] = set()  # names of models that wait for room

    @contextlib.contextmanager
    def wanting(self, name: str) -> Iterator[None]:
        """While a request waits for a model, which is not unloaded for others before it had it."""
        self._wanted[name] += 1
        try:
            yield
        finally:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name]

    def used(self, model: Model) -> None:
        """To be called for each request."""
        self._victims.used(model.name)

    async def with_room(self, model: Model, step: Step) -> None:
        """Does a step of a model's load. Where it finds no room, others are unloaded for it; none
        if all together would not do. While others have requests, whose memory will be free, it
        waits.

        Raises what the step raises.
        """
        freed = 0
        while True:
            before = self._others(model)
            shortage = model.shortage = await self._lacks(step)
            if shortage is None:
                return
            self._waiting.add(model.name)
            try:
                freed += await self._make_room(model, shortage, freed, before)
            finally:
                self._waiting.discard(model.name)

    def _others(self, model: Model) -> dict[str, State]:
        """Where all others stand, by id."""
        return {other.id: other.state for other in self._registry.all() if other is not model}

    @staticmethod
    async def _lacks(step: Step) -> Shortage | None:
        """Does the step; None if there was room."""
        try:
            await step()
        except NeverFits:  # whatever is unloaded
            raise
        except (InsufficientStorage, OutOfMemory) as error:
            return error
        return None

    async def _make_room(
        self, model: Model, shortage: Shortage, freed: int, before: Mapping[str, State]
    ) -> int:
        """Unloads what it takes, or waits for others that are being unloaded or loaded; returns the
        bytes that were held. Raises `shortage` where none of that can help, no other model has a
        request, and nothing has come or gone since `before`, when the step that found no room was
        begun."""
        missing = shortage.missing_bytes
        if not missing:  # not known: as much as the artifact has
            folder = model.fetched and model.fetched.path
            size = await asyncio.to_thread(size_bytes, folder) if folder else None
            missing = (model.stored.size_bytes if size is None else size) - freed
            if missing <= 0:
                return await self._wait_for_requests(model, shortage)
        held = await self._held_bytes(shortage)
        others = [m for m in self._registry.all() if m is not model]
        useful = [m for m in others if held.get(m.id)]
        leaving = [m for m in useful if m.state is State.DRAINING]
        missing -= sum(held[m.id] for m in leaving)
        if missing <= 0:
            await _one_changes(leaving)
            return 0
        useful = [m for m in useful if m.state is State.READY and not m.settings.pinned]
        coming = sum(self._workers.promised_bytes(m) for m in others)
        moving = any(self._is_arriving(m) for m in others) or self._others(model) != before
        if not moving and sum(held[m.id] for m in useful) + coming < missing:
            return await self._wait_for_requests(model, shortage)
        victims = self._choose(useful, held, shortage, missing)
        if not victims:
            await asyncio.sleep(LOOK_AGAIN_S)
        drained = [self._unload_for(model, victim) for victim in victims]
        if drained:
            await asyncio.wait(drained)
        return sum(held[victim.id] for victim in victims)

    async def _wait_for_requests(self, model: Model, shortage: Shortage) -> int:
        """What a request holds beside its model is free when it ends: keys and values, the memory
        of a pinned model's worker. Raises `shortage` where there is none."""
        if not any(m.in_flight for m in self._registry.all() if m is not model):
            raise shortage
        await asyncio.sleep(LOOK_AGAIN_S)
        return 0

    def _choose(
        self, useful: list[Model], held: Mapping[str, int], shortage: Shortage, missing: int
    ) -> list[Model]:
        """Those to unload: first such as nobody uses. One with requests is drained, and takes no
        more of them, so busy models cannot keep a cold one out for ever; one that has just been
        loaded serves those who wait for it first."""
        chosen: list[Model] = []
        for busy in (False, True):
            found = {
                m.name: (m, Held(held[m.id], _cost_s(m, shortage)))
                for m in sorted(useful, key=lambda m: m.last_used)
                if bool(m.in_flight) is busy
                and not m.restoring
                and (busy or m.name not in self._wanted)
            }
            names = self._victims.choose({name: h for name, (_, h) in found.items()}, missing)
            chosen += [found[name][0] for name in names]
            missing -= sum(found[name][1].bytes for name in names)
            if missing <= 0:
                break
        return chosen

    def _unload_for(self, model: Model, victim: Model) -> asyncio.Task[None]:
        idle_s = time.monotonic() - victim.last_used
        logger.info("model %s makes room for %s (idle for %.1f s)", victim.name, model.name, idle_s)
        self._observe("evicted", victim, idle_s)
        return self._registry.drain(victim)

    def _is_arriving(self, model: Model) -> bool:
        """Whether it may soon hold memory that can be freed then."""
        if model.settings.pinned or model.name in self._waiting:
            return False
        return model.state is State.LOADING or model.restoring

    async def _held_bytes(self, shortage: Shortage) -> dict[str, int]:
        """By id, what unloading each model would give back of what is short."""
        models = [m for m in self._registry.all() if m.state in (State.READY, State.DRAINING)]
        if isinstance(shortage, DiskFull):
            return await asyncio.to_thread(_disk_bytes, models)
        # What the engine's own budget lacks only the engine's models give back.
        engine_only = isinstance(shortage, OutOfMemory) and shortage.missing_bytes > 0
        return await self._workers.held_bytes(models, engine_only)

    async def watch(self) -> None:
        """Runs for ever: takes from idle models what costs most, and unloads those that have been
        idle for as long as they may be."""
        while True:
            await asyncio.sleep(IDLE_LOOK_S)
            for model in self._registry.all():
                if model.state is not State.READY or model.in_flight or model.restoring:
                    continue
                if model.name in self._wanted:
                    continue
                now = time.monotonic()
                idle_s, alone_s = now - model.last_used, now - model.last_shared
                if model.in_engine and model.connections > 1 and alone_s >= ONE_CONNECTION_S:
                    model.connections = 1
                    self._registry.spawn(self._workers.connect(model))
                limit_s = model.settings.idle_unload_s
                if limit_s is not None and idle_s >= limit_s and not model.settings.pinned:
                    logger.info("model %s is unloaded: idle for %.0f s", model.name, idle_s)
                    self._registry.drain(model)


async def _one_changes(models: Iterable[Model]) -> None:
    """Until one of them is gone, or answers its last request."""
    changes = [asyncio.ensure_future(model.change()) for model in models]
    try:
        await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for change in changes:
            change.cancel()


def _cost_s(model: Model, shortage: Shortage) -> float:
    """What it would take to bring a model back that is unloaded for want of this.

    The engine's models take about the same: how long one of them took says how busy the machine
    was, and whether it had to be prepared, which is done once.
    """
    fetch_s = 0.0
    if isinstance(shortage, DiskFull) and model.fetched is not None:
        fetch_s = model.fetched.download_s + model.fetched.unpack_s
    return fetch_s + (LOAD_S if model.in_engine else model.load_s)


def _disk_bytes(models: list[Model]) -> dict[str, int]:
    """What the cache could remove; a folder of this machine is used in place."""
    return {
        model.id: size_bytes(model.fetched.path)
        for model in models
        if model.fetched is not None
        and not (model.stored.kind == "folder" and "://" not in model.stored.url)
    }
