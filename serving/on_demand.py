"""Models that are loaded when they are asked for, and unloaded when another needs their room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

from engine.errors import NeverFits, OutOfMemory
from serving.errors import Conflict, ModelNotFound, NoRoom
from serving.model import Model, State
from serving.models import Registry
from serving.store import Lookups, StoredModel

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.02


class OnDemand:
    """Loads what the store has into `registry`; the least recently used model makes room."""

    def __init__(
        self,
        registry: Registry,
        lookups: Lookups,
        observe: Callable[[str, Model, float], None] = lambda event, model, seconds: None,
    ) -> None:
        self._registry, self._lookups, self._observe = registry, lookups, observe
        self._evictions = asyncio.Lock()
        self._wanted: Counter[str] = Counter()  # requests that have not begun to use their model
        self._loading: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """As `Registry.use`, but loads the model first. Raises what `ensure` does."""
        async with contextlib.AsyncExitStack() as stack:
            with self._wanting(name):
                await self.ensure(name)
                model = await stack.enter_async_context(self._registry.use(name))
            yield model

    @contextlib.contextmanager
    def _wanting(self, name: str) -> Iterator[None]:
        self._wanted[name] += 1
        try:
            yield
        finally:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name]

    async def ensure(self, name: str) -> None:
        """Has `name` loaded from the store, unless it is. Who asks meanwhile waits for that load.

        Raises `ModelNotFound` if the store has none, and what goes wrong with its load.
        """
        while not self._is_ready(name):
            task = self._loading.get(name)
            if task is None:
                task = self._loading[name] = self._registry.spawn(self._load(name))
                task.add_done_callback(lambda _: self._loading.pop(name, None))
            await asyncio.shield(task)

    async def preload(self, name: str) -> None:
        """Loads a model at the start, if there is room: nothing is unloaded for it.

        Raises what `ensure` does, and `NoRoom` or `OutOfMemory`.
        """
        stored = await self._lookups.find(name)
        with contextlib.suppress(Conflict):  # somebody has asked for it already
            await self._registry.load(name, stored.name, stored)

    def _is_ready(self, name: str) -> bool:
        model = self._registry.find(name)
        return model is not None and model.state is State.READY

    async def _load(self, name: str) -> None:
        while not self._is_ready(name):
            model = self._registry.find(name)
            if model is not None:  # someone loads it by its url, or it is being unloaded
                await model.change()
                continue
            stored = await self._lookups.find(name)
            if self._registry.find(name) is not None:
                continue
            unloads = self._registry.unloads
            try:
                await self._registry.load(name, stored.name, stored)
            except NeverFits:  # whatever is unloaded
                raise
            except (NoRoom, OutOfMemory) as error:
                await self._evict_and_load(name, stored, unloads, error)

    async def _evict_and_load(
        self, name: str, stored: StoredModel, unloads: int, error: Exception
    ) -> None:
        """One at a time: who makes room is the one that gets it. Raises `error` if none can be."""
        async with self._evictions:
            while self._registry.find(name) is None:
                if not await self._make_room(name, unloads):
                    raise error
                unloads = self._registry.unloads
                with contextlib.suppress(NoRoom, OutOfMemory, Conflict):
                    await self._registry.load(name, stored.name, stored)

    async def _make_room(self, name: str, unloads: int) -> bool:
        """Returns once a model has been unloaded that was loaded when `unloads` had been.

        That is the least recently used one, of those without requests if there are any. One with
        requests is drained first: it takes no more of them, so busy models cannot keep a cold one
        out for ever. Says whether there was one.
        """
        while self._registry.unloads == unloads:
            others = [m for m in self._registry.all() if m.name != name]
            if not others:
                return False
            # One that has just been loaded serves those who wait for it first.
            ready = [m for m in others if m.state is State.READY and not m.restoring]
            ready = [m for m in ready if m.in_flight or m.name not in self._wanted]
            if not ready:
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            victim = min(ready, key=lambda m: (m.in_flight > 0, m.last_used))
            idle_s = time.monotonic() - victim.last_used
            logger.info("model %s makes room for %s (idle for %.1f s)", victim.name, name, idle_s)
            self._observe("evicted", victim, idle_s)
            with contextlib.suppress(ModelNotFound):
                await self._registry.unload(victim.name)
        return True
