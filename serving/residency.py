"""Which models stay loaded: who makes room for another, and who has been idle for too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from engine.errors import NeverFits, OutOfMemory
from serving.errors import DiskFull, NoRoom
from serving.model import Model, State
from serving.models import Registry, Step
from serving.store.disk import size_bytes
from serving.workers import Workers

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.02
IDLE_LOOK_S = 1.0
# After so long a model keeps one connection of MMS's: sixteen of them cost it 4 MB.
ONE_CONNECTION_S = 30.0

Shortage = NoRoom | OutOfMemory


class Residency:
    """Unloads the least recently used models of `registry`, never a pinned one."""

    def __init__(
        self,
        registry: Registry,
        workers: Workers,
        observe: Callable[[str, Model, float], None] = lambda event, model, seconds: None,
    ) -> None:
        self._registry, self._workers, self._observe = registry, workers, observe
        self._evictions = asyncio.Lock()
        self._wanted: Counter[str] = Counter()  # requests that have not begun to use their model
        self._waiting: set[str] = set()  # ids of models that wait for room

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

    async def with_room(self, model: Model, step: Step) -> None:
        """Does a step of a model's load. Where it finds no room, others are unloaded for it, one at
        a time, the least recently used first; none if all together would not do.

        Raises what the step raises.
        """
        shortage = await self._lacks(step)
        if shortage is None:
            return
        freed = 0
        self._waiting.add(model.id)
        try:
            async with AsyncExitStack() as held:
                # Who makes room is the one that gets it. A fetch may take long: others need not
                # wait for that.
                if not isinstance(shortage, DiskFull):
                    await held.enter_async_context(self._evictions)
                while shortage is not None:
                    freed += await self._free(model, shortage, freed)
                    shortage = await self._lacks(step)
        finally:
            self._waiting.discard(model.id)

    @staticmethod
    async def _lacks(step: Step) -> Shortage | None:
        """Does the step; None if there was room."""
        try:
            await step()
        except NeverFits:  # whatever is unloaded
            raise
        except (NoRoom, OutOfMemory) as error:
            return error
        return None

    async def _free(self, model: Model, shortage: Shortage, freed: int) -> int:
        """Unloads one model, or waits for one that is being unloaded; returns the bytes it held.

        One with requests goes last, and is drained first: it takes no more of them, so busy models
        cannot keep a cold one out for ever. Raises `shortage` where that cannot help.
        """
        missing = shortage.missing_bytes
        if not missing:  # nobody knows: as much as the artifact has
            assert model.fetched is not None
            missing = await asyncio.to_thread(size_bytes, model.fetched.path) - freed
            if missing <= 0:
                raise shortage
        while True:
            held = await self._held_bytes(shortage)
            others = [m for m in self._registry.all() if m is not model]
            useful = [m for m in others if held.get(m.id)]
            leaving = next((m for m in useful if m.state is State.DRAINING), None)
            if leaving is not None:
                while self._registry.find(leaving.name) is leaving:
                    await leaving.change()
                return held[leaving.id]
            useful = [m for m in useful if not m.settings.pinned]
            arriving = any(self._is_arriving(m) for m in others)
            if not arriving and sum(held[m.id] for m in useful) < missing:
                raise shortage
            # One that has just been loaded serves those who wait for it first.
            ready = [m for m in useful if m.state is State.READY and not m.restoring]
            ready = [m for m in ready if m.in_flight or m.name not in self._wanted]
            if ready:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        victim = min(ready, key=lambda m: (m.in_flight > 0, m.last_used))
        idle_s = time.monotonic() - victim.last_used
        logger.info("model %s makes room for %s (idle for %.1f s)", victim.name, model.name, idle_s)
        self._observe("evicted", victim, idle_s)
        await asyncio.shield(self._registry.drain(victim))
        return held[victim.id]

    def _is_arriving(self, model: Model) -> bool:
        """Whether it may soon hold memory that can be freed then."""
        if model.settings.pinned or model.id in self._waiting:
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
                idle_s = time.monotonic() - model.last_used
                if model.in_engine and model.connections > 1 and idle_s >= ONE_CONNECTION_S:
                    model.connections = 1
                    self._registry.spawn(self._workers.connect(model))
                limit_s = model.settings.idle_unload_s
                if limit_s is not None and idle_s >= limit_s and not model.settings.pinned:
                    logger.info("model %s is unloaded: idle for %.0f s", model.name, idle_s)
                    self._registry.drain(model)


def _disk_bytes(models: list[Model]) -> dict[str, int]:
    """What the cache could remove; a folder of this machine is used in place."""
    return {
        model.id: size_bytes(model.fetched.path)
        for model in models
        if model.fetched is not None
        and not (model.stored.kind == "folder" and "://" not in model.stored.url)
    }
