"""Evicts models to free memory or disk for others, and unloads models that are idle."""

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

RETRY_S = 0.02  # between attempts of a load that waits for memory of other models
IDLE_POLL_S = 1.0  # between searches for idle models
# After this time without concurrent requests, a model has a single connection to MMS again; sixteen
# cost 4 MB. Shorter: clients wait more often until MMS has opened connections.
ONE_CONNECTION_S = 30.0

Shortage = InsufficientStorage | OutOfMemory


class Evictor:
    """Evicts the models of `registry` with the least value per byte, but no pinned model.

    Concurrent loads evict separately: freed memory is reserved for the load that needed it.
    """

    def __init__(
        self,
        registry: Registry,
        workers: Workers,
        observe: Callable[[str, Model, float], None],
    ) -> None:
        self._registry, self._workers, self._observe = registry, workers, observe
        self._victims = Victims[str]()
        self._wanted: Counter[str] = Counter()  # number of requests waiting for a load, by model
        self._waiting: set[str] = set()  # names of models whose load waits for an eviction

    @contextlib.contextmanager
    def wanting(self, name: str) -> Iterator[None]:
        """Protects a model from eviction while a request waits for it."""
        self._wanted[name] += 1
        try:
            yield
        finally:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name]

    def used(self, model: Model) -> None:
        """Count a request to a model: more requests make an eviction less likely."""
        self._victims.used(model.name)

    async def evict_and_retry(self, model: Model, step: Step) -> None:
        """Run a step of a model's load; while it lacks memory or disk, free some and run it again.

        After a shortage, the first of these that applies:

        1. Draining models free enough: wait for one of them.
        2. Evicting others frees the rest, or models are loading or have changed their state during
           the step: evict as few as possible, idle ones first, and wait for their end; if none can
           be evicted yet, wait for RETRY_S.
        3. Other models have requests, whose end frees K/V pages or memory: wait for RETRY_S.
        4. Evict nothing, and raise the shortage.
        """
        freed = 0  # bytes, by evictions for this step
        while True:
            before = self._states(model)
            model.shortage = shortage = await _shortage(step)
            if shortage is None:
                return
            self._waiting.add(model.name)
            try:
                missing = shortage.missing_bytes or await _stored_bytes(model) - freed
                freed += await self._free(model, shortage, missing, before)
            finally:
                self._waiting.discard(model.name)

    def _states(self, model: Model) -> dict[str, State]:
        """Return the states of all models but this one, by id."""
        return {other.id: other.state for other in self._registry.all() if other is not model}

    async def _free(
        self, model: Model, shortage: Shortage, missing: int, before: Mapping[str, State]
    ) -> int:
        """Do what follows a shortage; return the bytes that evictions freed.

        missing: bytes; 0 or less if evictions have freed the artifact's size already, of a shortage
            whose size is not known
        before: the states of the other models before the step
        """
        held = await self._held_bytes(shortage) if missing > 0 else {}
        others = [m for m in self._registry.all() if m not in (model, model.replaces)]
        holding = [m for m in others if held.get(m.id)]

        draining = [m for m in holding if m.state is State.DRAINING]
        leaving = sum(held[m.id] for m in draining)
        if 0 < missing <= leaving:
            await _any_changes(draining)
            return 0

        missing -= leaving
        evictable = [m for m in holding if m.state is State.READY and not m.settings.pinned]
        coming = sum(self._workers.promised_bytes(m) for m in others)
        enough = sum(held[m.id] for m in evictable) + coming >= missing
        moving = any(self._is_arriving(m) for m in others) or self._states(model) != before
        if missing > 0 and (enough or moving):
            victims = self._choose(evictable, held, shortage, missing)
            if victims:
                await asyncio.wait([self._unload_for(model, victim) for victim in victims])
            else:
                await asyncio.sleep(RETRY_S)
            return sum(held[victim.id] for victim in victims)

        if not any(m.in_flight for m in others):
            raise shortage
        await asyncio.sleep(RETRY_S)
        return 0

    def _choose(
        self, useful: list[Model], held: Mapping[str, int], shortage: Shortage, missing: int
    ) -> list[Model]:
        """Choose models to evict: idle models first, then models with requests.

        Models with requests are drained, so that constant load on them does not block another model
        for ever. A model without requests is exempt while a request still waits for its load.
        """
        chosen: list[Model] = []
        for busy in (False, True):
            candidates = {
                m.name: (m, Held(held[m.id], _cost_s(m, shortage)))
                for m in sorted(useful, key=lambda m: m.last_used)
                if bool(m.in_flight) is busy
                and not m.restoring
                and (busy or m.name not in self._wanted)
            }
            names = self._victims.choose({name: h for name, (_, h) in candidates.items()}, missing)
            chosen += [candidates[name][0] for name in names]
            missing -= sum(candidates[name][1].bytes for name in names)
            if missing <= 0:
                break
        return chosen

    def _unload_for(self, model: Model, victim: Model) -> asyncio.Task[None]:
        idle_s = time.monotonic() - victim.last_used
        logger.info("model %s is evicted for %s (idle for %.1f s)", victim.name, model.name, idle_s)
        self._observe("evicted", victim, idle_s)
        return self._registry.drain(victim)

    def _is_arriving(self, model: Model) -> bool:
        """Return whether a model is loading or restarting and can be evicted after that."""
        if model.settings.pinned or model.name in self._waiting:
            return False
        return model.state is State.LOADING or model.restoring

    async def _held_bytes(self, shortage: Shortage) -> dict[str, int]:
        """Return the bytes of memory or disk that unloading each model would free, by id."""
        models = [m for m in self._registry.all() if m.state in (State.READY, State.DRAINING)]
        if isinstance(shortage, DiskFull):
            return await asyncio.to_thread(_disk_bytes, models)
        # Only models in the engine free memory of the engine's budget.
        engine_only = isinstance(shortage, OutOfMemory) and shortage.missing_bytes > 0
        return await self._workers.held_bytes(models, engine_only)

    async def watch(self) -> None:
        """Close connections of idle models and unload models after their `idle_unload_s`."""
        while True:
            await asyncio.sleep(IDLE_POLL_S)
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


async def _shortage(step: Step) -> Shortage | None:
    """Run a step; return its shortage of memory or disk, unless no eviction can end that."""
    try:
        await step()
    except NeverFits:
        raise
    except (InsufficientStorage, OutOfMemory) as error:
        return error
    return None


async def _stored_bytes(model: Model) -> int:
    """Return the size of a model's artifact, which stands for the size of its shortage."""
    if model.fetched is None:
        return model.stored.size_bytes
    return await asyncio.to_thread(size_bytes, model.fetched.path)


async def _any_changes(models: Iterable[Model]) -> None:
    """Wait until one of the models changes its state or ends its last request."""
    changes = [asyncio.ensure_future(model.change()) for model in models]
    try:
        await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for change in changes:
            change.cancel()


def _cost_s(model: Model, shortage: Shortage) -> float:
    """Return the expected seconds to load a model again after its eviction for this shortage.

    A load in the engine counts as LOAD_S: its measured time varies with the load of the machine,
    and the first one includes the preparation, which happens once.
    """
    fetch_s = 0.0
    if isinstance(shortage, DiskFull) and model.fetched is not None:
        fetch_s = model.fetched.download_s + model.fetched.unpack_s
    return fetch_s + (LOAD_S if model.in_engine else model.load_s)


def _disk_bytes(models: list[Model]) -> dict[str, int]:
    """Return the bytes of each model that the cache could remove, by id.

    Models in folders of this machine are used in place and not included.
    """
    return {
        model.id: size_bytes(model.fetched.path)
        for model in models
        if model.fetched is not None and not model.stored.in_place
    }
