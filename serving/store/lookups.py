"""Looks models up in the store, asynchronously, with few requests to the store."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serving.errors import (
    ModelNotInStore,
    NotAModel,
    StoreAccessDenied,
    StoreUnavailable,
    Unavailable,
)
from serving.store.catalog import StoredModel
from serving.store.folder import closed_to_user
from serving.store.sources import Sources
from serving.store.stopping import Stop

# Time for which a missing name is cached. Longer: a model that is just uploaded is available later.
# Shorter: clients that use a wrong name cause more requests to the store.
MISSING_S = 1.0
MAX_MISSING = 4096  # names
LISTED_S = 1.0  # time for which the listing of a remote store is cached
LOOKUP_LIMIT_S, LISTING_LIMIT_S = 15.0, 60.0  # longer ones end with 503
# Two pools, so that lookups in a hanging remote store take no threads of those on the local disk.
THREADS, THREADS_HERE = 64, 8
MAX_WAITING = 256  # lookups in a pool; one more gets 503

T = TypeVar("T")
Key = tuple[str, ...]


class Lookups:
    """Looks models up; concurrent lookups of a name share one request. For one event loop.

    `now` is a clock, in seconds.
    """

    def __init__(self, sources: Sources, now: Callable[[], float] = time.monotonic) -> None:
        self._sources, self._store, self._now = sources, sources.store, now
        self._threads = ThreadPoolExecutor(THREADS, "store")
        self._threads_here = ThreadPoolExecutor(THREADS_HERE, "folder")
        self._running: dict[Key, asyncio.Future[StoredModel]] = {}
        # Cached errors and the times until which they are valid, the oldest first.
        self._missing: dict[Key, tuple[float, ModelNotInStore | NotAModel]] = {}
        self._waiting = Counter[ThreadPoolExecutor]()
        self._listing: asyncio.Future[list[StoredModel]] | None = None
        self._listed_until = 0.0

    async def find(self, name: str) -> StoredModel:
        """See `Store.find`."""
        return await self._once(("name", name), name, lambda: self._store.find(name))

    async def locate(self, url: str, handler: str | None = None) -> StoredModel:
        """See `Sources.locate`."""
        key = ("url", url, handler or "")
        return await self._once(key, url, lambda: self._sources.locate(url, handler))

    async def models(self) -> list[StoredModel]:
        """See `Store.models`."""
        listing = self._listing
        if listing is None or (listing.done() and self._now() >= self._listed_until):
            listing = self._listing = asyncio.ensure_future(self._list())
            listing.add_done_callback(self._listed)
        return await asyncio.shield(listing)

    async def file(
        self, path: str, known: str | None, max_bytes: int
    ) -> tuple[str | None, bytes | None]:
        """Return the version and the first `max_bytes` of a file in the store.

        The bytes are None if the version is `known`; both are None if there is no such file.
        Raises what `Store.file` and `Store.read` raise.
        """

        def read() -> tuple[str | None, bytes | None]:
            try:
                file = self._store.file(path)
                if file is None:
                    return None, None
                if file.version == known:
                    return known, None
                size = min(file.size_bytes, max_bytes)
                return file.version, b"".join(self._store.read(file, 0, size)) if size else b""
            except OSError as error:
                raise StoreUnavailable(f"{path} cannot be read: {error.strerror}") from None

        return await self._call(read, self._sources.is_here(""), LOOKUP_LIMIT_S)

    async def _list(self) -> list[StoredModel]:
        return await self._call(self._store.models, self._sources.is_here(""), LISTING_LIMIT_S)

    def _listed(self, listing: asyncio.Future[list[StoredModel]]) -> None:
        failed = listing.cancelled() or listing.exception() is not None
        fresh = failed or self._sources.is_here("")  # a folder of this machine is read each time
        self._listed_until = 0.0 if fresh else self._now() + LISTED_S

    def close(self) -> None:
        """Cancel waiting lookups. Running lookups end by themselves."""
        for threads in (self._threads, self._threads_here):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _once(self, key: Key, url: str, find: Callable[[], StoredModel]) -> StoredModel:
        until, error = self._missing.get(key, (0.0, None))
        if error is not None and self._now() < until:
            raise type(error)(error.message)
        lookup = self._running.get(key)
        if lookup is None:
            here = self._sources.is_here(url)
            lookup = self._running[key] = asyncio.ensure_future(self._find(key, find, here))
            lookup.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(lookup)

    async def _find(self, key: Key, find: Callable[[], StoredModel], here: bool) -> StoredModel:
        try:
            return await self._call(find, here, LOOKUP_LIMIT_S)
        except PermissionError as error:
            raise StoreAccessDenied(closed_to_user(error, key[1])) from None
        except OSError as error:  # the file system does not allow the name
            raise ModelNotInStore(f"Model not found: {key[1]} ({error.strerror})") from None

    async def _call(self, function: Callable[[], T], here: bool, limit_s: float) -> T:
        """Run `function` on a thread. Raises `StoreUnavailable` after `limit_s`."""
        stop, threads = Stop(), self._threads_here if here else self._threads
        if self._waiting[threads] >= MAX_WAITING:
            raise Unavailable(f"{MAX_WAITING} lookups in the store are waiting, which is the limit")

        def call() -> T:
            with stop.covers():
                return function()

        self._waiting[threads] += 1
        answer = asyncio.get_running_loop().run_in_executor(threads, call)
        answer.add_done_callback(functools.partial(self._answered, threads))
        try:
            return await asyncio.wait_for(asyncio.shield(answer), limit_s)
        except asyncio.TimeoutError:
            stop.set()
            raise StoreUnavailable(f"the store did not answer within {limit_s:g} s") from None

    def _answered(self, threads: ThreadPoolExecutor, answer: asyncio.Future[T]) -> None:
        self._waiting[threads] -= 1
        if not answer.cancelled():
            answer.exception()  # after a timeout: else asyncio logs that it was never retrieved

    def _done(self, key: Key, done: asyncio.Future[StoredModel]) -> None:
        del self._running[key]
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ModelNotInStore | NotAModel):
            self._missing.pop(key, None)
            self._missing[key] = self._now() + MISSING_S, type(error)(error.message)
            if len(self._missing) > MAX_MISSING:
                del self._missing[next(iter(self._missing))]
