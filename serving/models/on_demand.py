"""Loads models of the store at their first request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from serving.errors import Conflict, Forbidden
from serving.models.evictor import Evictor
from serving.models.model import LoadRequest, Model, State
from serving.models.registry import Registry, load_once
from serving.store import Lookups, StoredModel
from serving.tokens import current


class OnDemand:
    """Loads models of the store into `registry`; `evictor` evicts others for them."""

    def __init__(self, registry: Registry, lookups: Lookups, evictor: Evictor) -> None:
        self._registry, self._lookups, self.evictor = registry, lookups, evictor
        # By name and token: a load that one token may not do fails for that token only.
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """Load a model if necessary, and hold it loaded until the exit.

        Raises what `ensure` and `Registry.use` raise.
        """
        async with contextlib.AsyncExitStack() as stack:
            with self.evictor.wanting(name):
                await self.ensure(name)
                model = await stack.enter_async_context(self._registry.use(name))
                self.evictor.used(model)
            yield model

    async def ensure(self, name: str) -> None:
        """Load `name` from the store, unless it is loaded. Concurrent calls share a load.

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
        """Load a model at the server's start, without evicting others.

        Raises what `ensure` does, and `InsufficientStorage` or `OutOfMemory`.
        """
        request, stored = await self._locate(name)
        with contextlib.suppress(Conflict):  # a request loads it already
            await asyncio.shield(self._registry.load(name, request, stored))

    async def refresh(self, name: str, *, evict: bool) -> None:
        """Load the store's version of a model. Another version answers until this one is ready.

        Concurrent calls share a load. `evict`: others may be evicted for it. Raises what `ensure`
        does; the other version then stays, see `Registry.replace`.
        """
        attempt = self.evictor.evict_and_retry if evict else load_once
        with self.evictor.wanting(name):
            request, stored = await self._locate(name)
            while True:  # nothing is awaited between a look at the state and its use
                running, model = self._registry.loading(name), self._registry.find(name)
                if running is not None and running.loading is not None:
                    await asyncio.wait({load := running.loading})
                    if running.stored.key == stored.key:
                        with contextlib.suppress(Forbidden):  # of the other call's token
                            load.result()
                            return
                elif model is None:
                    await asyncio.shield(self._registry.load(name, request, stored, attempt))
                    return
                elif model.state is not State.READY:
                    await model.change()
                elif model.stored.key == stored.key:
                    return
                else:
                    await asyncio.shield(self._registry.replace(model, stored, attempt))
                    return

    async def _locate(self, name: str) -> tuple[LoadRequest, StoredModel]:
        """Return the load request of a model, the remembered one if there is any, and its files.

        Raises what `Store.find` and `Sources.locate` raise.
        """
        request = self._registry.request(name)
        if request is None:
            stored = await self._lookups.find(name)
            return LoadRequest(stored.name), stored
        return request, await self._lookups.locate(request.url, request.options.get("handler"))

    def _is_ready(self, name: str) -> bool:
        model = self._registry.find(name)
        return model is not None and model.state is State.READY

    async def _load(self, name: str) -> None:
        while not self._is_ready(name):
            model = self._registry.find(name)
            if model is not None:  # a load by a request, or an unload, is running
                await model.change()
                continue
            request, stored = await self._locate(name)
            if self._registry.find(name) is None:
                attempt = self.evictor.evict_and_retry
                await asyncio.shield(self._registry.load(name, request, stored, attempt))
