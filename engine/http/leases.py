"""Leases: a model stays loaded while it has one, and goes soon after the last one ended: once what
was begun with it is finished, since a stream needs no worker any more."""

from __future__ import annotations

import asyncio
import collections
import functools

from starlette.concurrency import run_in_threadpool

from common.errors import ModelNotFound
from engine.registry import Engine

# How long a model outlives its last lease: a worker that crashed is restarted within this time.
GRACE_S = 3.0


class Leases:
    """All calls come from the event loop's thread."""

    def __init__(self, engine: Engine, stopping: asyncio.Event, grace_s: float = GRACE_S) -> None:
        """Once the engine is `stopping`, workers end while requests are still running: the models
        go with the engine then, not with their leases."""
        self._engine = engine
        self._stopping = stopping
        self._grace_s = grace_s
        self._counts: collections.Counter[str] = collections.Counter()
        self._unloads: dict[str, asyncio.Task[None]] = {}

    def take(self, name: str) -> None:
        """Before the load that it is for: so that this finds the model, or loads it anew."""
        self._counts[name] += 1
        if name in self._unloads:
            self._unloads[name].cancel()

    def release(self, name: str) -> None:
        self._counts[name] -= 1
        if not self._is_leased(name):
            del self._counts[name]
            unload = asyncio.get_running_loop().create_task(self._unload(name))
            self._unloads[name] = unload
            unload.add_done_callback(functools.partial(self._forget, name))

    def _forget(self, name: str, unload: asyncio.Task[None]) -> None:
        if self._unloads.get(name) is unload:
            del self._unloads[name]

    def _is_leased(self, name: str) -> bool:
        return self._counts.get(name, 0) > 0

    async def _unload(self, name: str) -> None:
        gone = False
        while not gone:
            await asyncio.sleep(self._grace_s)
            if self._stopping.is_set():
                return
            try:
                gone = await run_in_threadpool(
                    self._engine.unload,
                    name,
                    unless=lambda model: self._is_leased(name) or not model.answered,
                )
            except ModelNotFound:
                return
