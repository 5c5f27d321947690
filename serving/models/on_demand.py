"""Models that are loaded when they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from serving.errors import Conflict
from serving.models.model import Model, State
from serving.models.registry import Registry
from serving.models.residency import Residency
from serving.store import Lookups


class OnDemand:
    """Loads what the store has into `registry`; where there is no room, `residency` makes some."""

    def __init__(self, registry: Registry, lookups: Lookups, residency: Residency) -> None:
        self._registry, self._lookups, self.residency = registry, lookups, residency
        self._loading: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """As `Registry.use`, but loads the model first. Raises what `ensure` does."""
        async with contextlib.AsyncExitStack() as stack:
            with self.residency.wanting(name):
                await self.ensure(name)
                model = await stack.enter_async_context(self._registry.use(name))
                self.residency.used(model)
            yield model

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

        Raises what `ensure` does, and `InsufficientStorage` or `OutOfMemory`.
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
            if self._registry.find(name) is None:
                attempt = self.residency.with_room
                await self._registry.load(name, stored.name, stored, attempt=attempt)
