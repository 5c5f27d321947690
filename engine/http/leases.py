"""Leases: a model is unloaded `GRACE_S` after its last lease has ended.

The unload waits until all of the model's requests are answered, since streams go on without the
worker that had the lease.
"""

from __future__ import annotations

import asyncio
import collections
import functools

from starlette.concurrency import run_in_threadpool

from common.errors import ModelNotFound
from engine.engine import Engine

# How long a model stays loaded after its last lease. Shorter than the restart of a crashed worker:
# the model is unloaded and loaded again.
GRACE_S = 3.0


class Leases:
    """The leases of all models. Used on the event loop's thread only."""

    def __init__(self, engine: Engine, stopping: asyncio.Event, grace_s: float = GRACE_S) -> None:
        """Create an empty set of leases.

        Once `stopping` is set no model is unloaded: workers end before the requests in flight do,
        and the engine unloads all models in the end.
        """
        self._engine = engine
        self._stopping = stopping
        self._grace_s = grace_s
        self._counts: collections.Counter[str] = collections.Counter()
        self._unloads: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()  # models that a lease has kept loaded

    def take(self, name: str) -> None:
        """Count a new lease of a model, before the model is loaded."""
        self._counts[name] += 1
        if name in self._unloads:
            self._unloads[name].cancel()

    def release(self, name: str, *, loaded: bool = True) -> None:
        """End a lease. If its load failed, a model loaded without a lease stays."""
        self._counts[name] -= 1
        if loaded:
            self._held.add(name)
        if self._is_leased(name):
            return
        del self._counts[name]
        if name in self._held:
            unload = asyncio.get_running_loop().create_task(self._unload(name))
            self._unloads[name] = unload
            unload.add_done_callback(functools.partial(self._forget, name))

    def _forget(self, name: str, unload: asyncio.Task[None]) -> None:
        if self._unloads.get(name) is unload:
            del self._unloads[name]

    def _is_leased(self, name: str) -> bool:
        return self._counts.get(name, 0) > 0

    async def _unload(self, name: str) -> None:
        unloaded = False
        while not unloaded:
            await asyncio.sleep(self._grace_s)
            if self._stopping.is_set():
                return
            try:
                unloaded = await run_in_threadpool(
                    self._engine.unload,
                    name,
                    unless=lambda model: self._is_leased(name) or not model.answered,
                )
            except ModelNotFound:
                unloaded = True
        self._held.discard(name)
