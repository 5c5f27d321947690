"""Fetches models' files into the cache, on threads, and releases them."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from handlers.user_code.entry_point import manifest_name
from serving.errors import Timeout
from serving.store import Cache, Fetched, Stop, StoredModel

# Threads of three pools: downloads do not delay fetches from this machine's disk, nor do both delay
# cached models. They may wait for locks of other processes that share the cache.
CACHED_AT_ONCE, FETCHES_AT_ONCE, DOWNLOADS_AT_ONCE = 4, 4, 16


class Fetches:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # Not in asyncio's default pool: fetches may hang, and releases must not wait for a thread.
        self._cached = ThreadPoolExecutor(CACHED_AT_ONCE, "cached")
        self._here = ThreadPoolExecutor(FETCHES_AT_ONCE, "fetch")
        self._downloads = ThreadPoolExecutor(DOWNLOADS_AT_ONCE, "download")

    async def fetch(self, stored: StoredModel, stop: Stop | None = None) -> tuple[Fetched, float]:
        """Fetch a model; return its folder and the seconds, without the wait for a thread.

        Raises errors of `Cache.acquire`. Cancellation stops the fetch.
        """
        stop = stop or Stop()
        threads = self._here if stored.is_local else self._downloads
        if stored.in_place or await asyncio.to_thread(self._cache.holds, stored):
            threads = self._cached

        def acquire() -> tuple[Fetched, float]:
            started = time.monotonic()
            return self._cache.acquire(stored, stop), time.monotonic() - started

        fetch = asyncio.get_running_loop().run_in_executor(threads, acquire)
        try:
            return await asyncio.shield(fetch)
        except asyncio.CancelledError:  # timed out, or unloaded
            stop.set()
            fetch.add_done_callback(self._discard)
            raise

    def _discard(self, fetch: asyncio.Future[tuple[Fetched, float]]) -> None:
        if not fetch.cancelled() and fetch.exception() is None:
            self._cache.release(fetch.result()[0].path)

    async def release(self, fetched: Fetched, *, discard: bool = False) -> None:
        """Release a model's folder, so that it may be evicted; see `Cache.release`."""
        await asyncio.to_thread(self._cache.release, fetched.path, discard=discard)

    async def manifest_name(self, stored: StoredModel, limit_s: float) -> str | None:
        """Fetch a model and return the name in its MMS manifest; None without a manifest.

        Raises errors of the fetch and of the manifest.
        """
        try:
            fetched, _ = await asyncio.wait_for(self.fetch(stored), limit_s)
        except asyncio.TimeoutError:
            raise Timeout(
                f"{stored.name} was not fetched within {limit_s} s (LOAD_TIMEOUT_S)"
            ) from None
        broken = True
        try:
            name = await asyncio.to_thread(manifest_name, fetched.path)
            broken = False
        finally:
            await self.release(fetched, discard=broken)
        return name
