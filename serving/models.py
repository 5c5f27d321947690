"""The models that are served: fetched, loading, ready, draining, gone.

    absent -> fetching -> loading -> ready -> draining -> absent
                 \\-> failed: the reason goes to whoever asked, and the name is free again

One event loop owns the registry; nothing here is called from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from handlers.scripts.find import manifest_name
from serving.admission import Line
from serving.errors import Conflict, ModelNotFound, Timeout, Unavailable
from serving.memory import check_room
from serving.model import Model, State
from serving.settings import Settings
from serving.store import Cache, Fetched, StoredModel
from serving.workers import MMS_GRACE_S, Workers

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE = 4


class Registry:
    """Owns the life of every model. `save` is called with those that are ready when they change."""

    def __init__(
        self,
        settings: Settings,
        workers: Workers,
        cache: Cache,
        observe: Callable[[str, Model, float], None] = lambda event, model, seconds: None,
        save: Callable[[Iterable[Model]], None] = lambda models: None,
    ) -> None:
        self._settings, self._workers, self._cache = settings, workers, cache
        self._observe, self._save = observe, save
        self._models: dict[str, Model] = {}
        # MMS may still know models of a gateway before this one.
        self._ids = (f"{secrets.token_hex(3)}-{number}" for number in itertools.count(1))
        self._fetches = asyncio.Semaphore(FETCHES_AT_ONCE)
        # Apart from what only gives things back: fetches may hang.
        self._fetching = ThreadPoolExecutor(FETCHES_AT_ONCE, "fetch")
        self._tasks: set[asyncio.Task[Any]] = set()
        self.unloads = 0  # so far

    # Looking

    def models(self) -> list[Model]:
        """All that a list shows: loaded and not on their way out, by name."""
        ready = (m for m in self._models.values() if m.state is State.READY)
        return sorted(ready, key=lambda m: m.name)

    def all(self) -> list[Model]:
        """In whatever state."""
        return list(self._models.values())

    def find(self, name: str) -> Model | None:
        """In whatever state; None if the name is free."""
        return self._models.get(name)

    def get(self, name: str) -> Model:
        """Raises `ModelNotFound` for one that is not ready."""
        model = self._models.get(name)
        if model is None or model.state is not State.READY:
            raise ModelNotFound(f"Model not found: {name}")
        return model

    def engine_names(self) -> dict[str, str]:
        """Names of all models, by their names in the engine."""
        return {model.engine_name: model.name for model in self._models.values()}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Does `work` to its end, also when the client that asked for it goes away."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Loading

    async def load(self, name: str, url: str, stored: StoredModel, **options: Any) -> Model:
        """Loads a model under a free name. Raises `Conflict` for a taken one, and what goes wrong:
        then the name is free again, and neither process nor memory is left."""
        if name in self._models:
            state = self._models[name].state.value
            raise Conflict(f"Model {name} is already registered ({state})")
        options = {"response_timeout": self._settings.request_timeout_s, **options}
        line = Line(max_waiting=self._settings.max_waiting)
        model = Model(name, url, next(self._ids), stored, options, line=line)
        self._models[name] = model
        loaded: Model = await asyncio.shield(self.spawn(self._load(model)))
        return loaded

    async def manifest_name(self, stored: StoredModel) -> str | None:
        """What the manifest of Multi Model Server's archives calls the model; fetches it first.

        None where there is none. Raises what goes wrong.
        """
        try:
            fetched = await asyncio.wait_for(self._fetch(stored), self._settings.load_timeout_s)
        except asyncio.TimeoutError:
            limit = self._settings.load_timeout_s
            raise Timeout(f"{stored.name} was not fetched within {limit} s") from None
        broken = True
        try:
            found = await asyncio.to_thread(manifest_name, fetched.path)
            broken = False
        finally:
            await asyncio.to_thread(self._cache.release, fetched.path, discard=broken)
        return found

    async def _load(self, model: Model) -> Model:
        started = time.monotonic()
        try:
            await asyncio.wait_for(self._fetch_and_start(model), self._settings.load_timeout_s)
        except BaseException as error:
            model.error = error if isinstance(error, Exception) else Unavailable("stopping")
            if isinstance(error, asyncio.TimeoutError):
                limit = self._settings.load_timeout_s
                model.error = Timeout(f"Model {model.name} did not load within {limit} s")
            await self._clean_up(model)
            del self._models[model.name]
            model.set()
            logger.error("model %s did not load: %s", model.name, model.error)
            raise model.error from None
        model.last_used = time.monotonic()
        model.set(State.READY)
        self._save(self.models())
        seconds = time.monotonic() - started
        logger.info(
            "loaded model %s from %s in %.2f s", model.name, model.url, seconds,
            extra={"fields": {"model": model.name}},
        )  # fmt: skip
        return model

    async def _fetch_and_start(self, model: Model) -> None:
        async with self._fetches:
            started = time.monotonic()
            model.fetched = await self._fetch(model.stored)
            self._observe("fetched", model, time.monotonic() - started)
        async with self._workers.turn:
            model.set(State.LOADING)
            check_room(model.name)
            started = time.monotonic()
            await self._workers.start(model)
            self._observe("loaded", model, time.monotonic() - started)

    async def _fetch(self, stored: StoredModel) -> Fetched:
        loop = asyncio.get_running_loop()
        thread = loop.run_in_executor(self._fetching, self._cache.acquire, stored)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:  # took too long; the thread goes on
            thread.add_done_callback(self._give_back)
            raise

    def _give_back(self, thread: asyncio.Future[Fetched]) -> None:
        if not thread.cancelled() and thread.exception() is None:
            self._cache.release(thread.result().path)

    async def _clean_up(self, model: Model) -> None:
        await self._workers.end(model)
        if model.fetched is not None:
            # What is no model is fetched again when it is asked for again, and may be one then.
            refused = 400 <= getattr(model.error, "status", 500) < 500
            await asyncio.to_thread(self._cache.release, model.fetched.path, discard=refused)

    async def adopt(self, model: Model) -> None:
        """Takes over a model that a gateway before this one has loaded, under a free name.

        Raises `ServingError` if its artifact is no longer to be had.
        """
        model.fetched = await self._fetch(model.stored)
        model.state = State.READY
        self._models[model.name] = model

    # Unloading

    async def unload(self, name: str) -> None:
        """Stops new requests, waits for those in flight, frees everything, and only then returns.

        Raises `ModelNotFound`.
        """
        model = self._models.get(name)
        while model is not None and model.state in (State.FETCHING, State.LOADING):
            await model.change()  # its load ends first
            if self._models.get(name) is not model:
                model = None
        if model is None or model.state is State.DRAINING:
            raise ModelNotFound(f"Model not found: {name}")
        model.set(State.DRAINING)
        await asyncio.shield(self.spawn(self._unload(model)))

    async def _unload(self, model: Model) -> None:
        started = time.monotonic()
        try:
            limit = model.request_timeout_s + MMS_GRACE_S
            await asyncio.wait_for(self._drained(model), limit)
        except asyncio.TimeoutError:
            logger.error("model %s is unloaded with %d requests left", model.name, model.in_flight)
        await self._clean_up(model)
        del self._models[model.name]
        self.unloads += 1
        model.set()
        self._save(self.models())
        self._observe("unloaded", model, time.monotonic() - started)
        logger.info("unloaded model %s", model.name, extra={"fields": {"model": model.name}})

    @staticmethod
    async def _drained(model: Model) -> None:
        while model.in_flight or model.restoring:
            await model.change()

    # Using

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """A loaded model that stays until the request is done. Raises `ModelNotFound`."""
        model = self.get(name)
        model.in_flight += 1
        model.last_used = time.monotonic()
        try:
            yield model
        finally:
            model.in_flight -= 1
            model.last_used = time.monotonic()
            if model.in_flight == 0:
                model.set()
