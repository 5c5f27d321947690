"""Loads models of the store at their first request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from serving.errors import Conflict
from serving.models.model import Model, State
from serving.models.registry import Registry
from serving.models.residency import Residency
from serving.store import Lookups
from serving.tokens import current


class OnDemand:
    """Loads models of the store into `registry`; `residency` evicts others for them."""

    def __init__(self, registry: Registry, lookups: Lookups, residency: Residency) -> None:
        self._registry, self._lookups, self.residency = registry, lookups, residency
        # By name and token: a load that one token may not do fails for that token only.
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """Loads a model if necessary, and holds it loaded until the exit.

        Raises what `ensure` and `Registry.use` raise.
        """
        async with contextlib.AsyncExitStack() as stack:
            with self.residency.wanting(name):
                await self.ensure(name)
                model = await stack.enter_async_context(self._registry.use(name))
                self.residency.used(model)
            yield model

    async def ensure(self, name: str) -> None:
        """Loads `name` from the store, unless it is loaded. Concurrent calls share a load.

        Raises `ModelNotFound` if the store has no such model, and the error of its load.
        """
        token = current.get()
        key = (name, "" if token is None else token.name)
        while not self._is_ready(name):
            task = self._loading.get(key)
            if task is None:
                task = self._loading[key] = self._registry.spawn(self._load(name))
                task.add_done_callback(lambda _: self._loading.pop(key, None))
            await asyncio.shield(task)

    async def preload(self, name: str) -> None:
        """Loads a model at the server's start, without evicting others.

        Raises what `ensure` does, and `InsufficientStorage` or `OutOfMemory`.
        """
        stored = await self._lookups.find(name)
        with contextlib.suppress(Conflict):  # a request loads it already
            await asyncio.shield(self._registry.load(name, stored.name, stored))

    def _is_ready(self, name: str) -> bool:
        model = self._registry.find(name)
        return model is not None and model.state is State.READY

    async def _load(self, name: str) -> None:
        while not self._is_ready(name):
            model = self._registry.find(name)
            if model is not None:  # a load by a request, or an unload, is running
                await model.change()
                continue
            stored = await self._lookups.find(name)
            if self._registry.find(name) is None:
                attempt = self.residency.evict_and_retry
                load = self._registry.load(name, stored.name, stored, attempt=attempt)
                await asyncio.shield(load)
