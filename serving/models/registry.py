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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from common.errors import OutOfMemory, ServiceError
from handlers.user_code.entry_point import manifest_name
from serving.errors import (
    BadRequest,
    Conflict,
    LoadCancelled,
    ModelNotFound,
    Timeout,
    WorkerLost,
)
from serving.mms.workers import MMS_GRACE_S, Workers
from serving.models.admission import Line
from serving.models.model import Model, State, no_room_yet
from serving.models.model_settings import ModelSettings
from serving.models.worker_memory import check_worker_memory
from serving.settings import Settings
from serving.store import Cache, Fetched, Stop, StoredModel

logger = logging.getLogger(__name__)

# What comes from a store elsewhere may be slow; nothing of this machine waits for it.
FETCHES_AT_ONCE, DOWNLOADS_AT_ONCE = 4, 16

T = TypeVar("T")
Step = Callable[[], Awaitable[None]]
# Does one step of a model's load; what it does when the step finds no room is its own matter.
Attempt = Callable[[Model, Step], Awaitable[None]]


class _Lane:
    """So many fetches at once; `turn` is held meanwhile."""

    def __init__(self, at_once: int, name: str) -> None:
        self.turn = asyncio.Semaphore(at_once)
        self.threads = ThreadPoolExecutor(at_once, name)


async def _once(model: Model, step: Step) -> None:
    await step()


# Of a model's folder and settings: the base, where it is an adapter.
FindBase = Callable[[Path, ModelSettings], Awaitable[StoredModel | None]]


async def _no_base(folder: Path, settings: ModelSettings) -> StoredModel | None:
    return None


class Registry:
    """Owns the life of every model. `save` is called with those that are ready when they change,
    `changed` with a model whose state has; `find_base` says what a model is an adapter of."""

    def __init__(
        self,
        settings: Settings,
        workers: Workers,
        cache: Cache,
        observe: Callable[[str, Model, float], None] = lambda event, model, seconds: None,
        save: Callable[[Iterable[Model]], None] = lambda models: None,
        changed: Callable[[Model], None] = lambda model: None,
        find_base: FindBase = _no_base,
    ) -> None:
        self._settings, self._workers, self._cache = settings, workers, cache
        self._find_base = find_base
        self._observe, self._save, self._changed = observe, save, changed
        self._models: dict[str, Model] = {}
        # MMS may still know models of a gateway before this one.
        self._ids = (f"{secrets.token_hex(3)}-{number}" for number in itertools.count(1))
        # Apart from what only gives things back: fetches may hang.
        self._fetches = _Lane(FETCHES_AT_ONCE, "fetch")
        self._downloads = _Lane(DOWNLOADS_AT_ONCE, "download")
        self._tasks: set[asyncio.Task[Any]] = set()

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
        model = self.find(name)
        if model is None or model.state is not State.READY:
            raise ModelNotFound(f"Model not found: {name}")
        return model

    def engine_names(self) -> dict[str, str]:
        """Names of all models, by their names in the engine."""
        return {model.engine_name: model.name for model in self._models.values()}

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Does `work` to its end, also when the client that asked for it goes away."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServiceError):
            logger.error("work on a model failed", exc_info=error)

    def save(self) -> None:
        """To be called when what a gateway after this one must know of a model has changed."""
        self._save(self.models())

    # Loading

    async def load(
        self,
        name: str,
        url: str,
        stored: StoredModel,
        settings: ModelSettings | None = None,
        attempt: Attempt = _once,
        **options: Any,
    ) -> Model:
        """Loads a model under a free name. Raises `Conflict` for a taken one, `LoadCancelled` if it
        is unloaded meanwhile, and what goes wrong: then the name is free again, and neither process
        nor memory is left."""
        return await asyncio.shield(self.begin(name, url, stored, settings, attempt, **options))

    def begin(
        self,
        name: str,
        url: str,
        stored: StoredModel,
        settings: ModelSettings | None = None,
        attempt: Attempt = _once,
        **options: Any,
    ) -> asyncio.Task[Model]:
        """Takes the name and begins to load; the task ends as `load` does. Raises `Conflict`."""
        if name in self._models:
            state = self._models[name].state.value
            raise Conflict(f"Model {name} is already registered ({state})")
        options = {"response_timeout": self._settings.request_timeout_s, **options}
        line = Line(max_waiting=self._settings.max_waiting)
        settings = settings or ModelSettings()
        model = Model(name, url, next(self._ids), stored, options, settings, line=line)
        self._models[name] = model
        model.changed = self._changed
        model.set()
        model.work = asyncio.create_task(self._fetch_and_start(model, attempt))
        return self.spawn(self._load(model, model.work))

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

    async def _load(self, model: Model, work: asyncio.Task[None]) -> Model:
        started = time.monotonic()
        model.error = await self._outcome(model, work)
        model.work = None
        if model.error is not None:
            await self._remove(model)
            level = logging.ERROR
            if isinstance(model.error, LoadCancelled):
                level = logging.INFO
            elif isinstance(model.error, BadRequest):  # the client's mistake, or its file's
                level = logging.WARNING
            logger.log(level, "model %s did not load: %s", model.name, model.error)
            raise model.error
        model.starts += 1
        model.last_used = time.monotonic()
        model.set(State.READY)
        self.save()
        seconds = time.monotonic() - started
        logger.info(
            "loaded model %s from %s in %.2f s", model.name, model.url, seconds,
            extra={"fields": {"model": model.name}},
        )  # fmt: skip
        return model

    async def _outcome(self, model: Model, work: asyncio.Task[None]) -> Exception | None:
        """How a load ends; it has ended then."""
        limit_s = self._settings.load_timeout_s
        await asyncio.wait({work}, timeout=limit_s)
        if not work.done():
            shortage = model.shortage
            await _cancelled(work)
            if shortage is not None:
                return no_room_yet(shortage, limit_s)
            return Timeout(f"Model {model.name} did not load within {limit_s} s")
        if work.cancelled():
            return LoadCancelled(f"Model {model.name} was unloaded while it was being loaded")
        error = work.exception()
        assert error is None or isinstance(error, Exception)
        if isinstance(error, ServiceError):  # the engine knows it by its folder in the cache
            error.message = error.message.replace(model.stored.key, model.name)
            if (base := model.stored_base) is not None:
                error.message = error.message.replace(base.key, base.name)
        return error

    async def _fetch_and_start(self, model: Model, attempt: Attempt) -> None:
        async def fetch() -> None:
            lane = await self._lane(model.stored)
            async with lane.turn:
                started = time.monotonic()
                model.fetched = await self._fetch(model.stored, lane)
                self._observe("fetched", model, time.monotonic() - started)

        async def fetch_base() -> None:
            assert model.stored_base is not None
            lane = await self._lane(model.stored_base)
            async with lane.turn:
                model.base = await self._fetch(model.stored_base, lane)

        async def start() -> None:
            async with self._workers.turn:
                model.set(State.LOADING)
                check_worker_memory(model.name)
                for last in (False, False, True):
                    checked = await self._workers.check(model)
                    started = time.monotonic()
                    try:
                        await self._workers.start(model)
                        break
                    except WorkerLost:
                        await self._workers.forget(model)
                        model.id = next(self._ids)  # MMS is not done with the other one yet
                        if last:
                            raise
                    except ServiceError as error:
                        await self._workers.end(model)  # before another attempt
                        # Another load may have taken the room since: then the check says how much.
                        if last or not checked or not isinstance(error, OutOfMemory):
                            raise
                model.load_s = time.monotonic() - started
                self._observe("loaded", model, model.load_s)

        await attempt(model, fetch)
        assert model.fetched is not None
        of_file = await asyncio.to_thread(ModelSettings.read, model.fetched.path)
        model.settings = model.settings.over(of_file)
        if model.settings.queue is not None:
            model.line.max_waiting = model.settings.queue
        model.stored_base = await self._find_base(model.fetched.path, model.settings)
        if model.stored_base is not None:
            await attempt(model, fetch_base)
        await attempt(model, start)

    async def _lane(self, stored: StoredModel) -> _Lane:
        is_here = "://" not in stored.url or await asyncio.to_thread(self._cache.holds, stored)
        return self._fetches if is_here else self._downloads

    async def _fetch(self, stored: StoredModel, lane: _Lane | None = None) -> Fetched:
        lane = lane or await self._lane(stored)
        loop, given_up = asyncio.get_running_loop(), Stop()
        thread = loop.run_in_executor(lane.threads, self._cache.acquire, stored, given_up)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:  # took too long, or is not wanted any more
            given_up.set()
            thread.add_done_callback(self._give_back)
            raise

    def _give_back(self, thread: asyncio.Future[Fetched]) -> None:
        if not thread.cancelled() and thread.exception() is None:
            self._cache.release(thread.result().path)

    async def _remove(self, model: Model) -> None:
        """Frees what the model has, and its name, whatever goes wrong with the rest."""
        try:
            await self._workers.end(model)
            if model.fetched is not None:
                # What is no model is fetched again when it is asked for again, and may be one then.
                cancelled = isinstance(model.error, LoadCancelled)
                refused = not cancelled and 400 <= getattr(model.error, "status", 500) < 500
                await asyncio.to_thread(self._cache.release, model.fetched.path, discard=refused)
            if model.base is not None:
                await asyncio.to_thread(self._cache.release, model.base.path)
        except Exception:
            logger.exception("model %s was not cleaned up after", model.name)
        finally:
            del self._models[model.name]
            model.set()

    async def adopt(self, model: Model) -> None:
        """Takes over a model that a gateway before this one has loaded.

        Raises `Conflict` for a name that is taken, and what goes wrong if its artifact is no longer
        to be had.
        """
        if self._models.setdefault(model.name, model) is not model:
            raise Conflict(f"Model {model.name} is already registered")
        model.changed = self._changed
        try:
            model.fetched = await self._fetch(model.stored)
            if model.stored_base is not None:
                model.base = await self._fetch(model.stored_base)
        except BaseException:
            del self._models[model.name]
            model.set()
            raise
        model.starts += 1
        model.set(State.READY)

    # Unloading

    async def unload(self, name: str) -> None:
        """Stops new requests, waits for those in flight, frees everything, and only then returns.

        A load that is under way is ended. Raises `ModelNotFound`.
        """
        model = self.find(name)
        while model is not None and model.state in (State.FETCHING, State.LOADING):
            if model.work is not None:
                model.work.cancel()
            await model.change()
            if self._models.get(model.name) is not model:
                return
        if model is None or model.state is State.DRAINING:
            raise ModelNotFound(f"Model not found: {name}")
        await asyncio.shield(self.drain(model))

    def drain(self, model: Model) -> asyncio.Task[Any]:
        """Begins to unload a ready model, with no request between the look at it and this."""
        assert model.state is State.READY
        model.set(State.DRAINING)
        return self.spawn(self._unload(model))

    async def _unload(self, model: Model) -> None:
        started = time.monotonic()
        try:
            limit = model.request_timeout_s + MMS_GRACE_S
            await asyncio.wait_for(self._drained(model), limit)
        except asyncio.TimeoutError:
            logger.error("model %s is unloaded with %d requests left", model.name, model.in_flight)
        if model.work is not None:  # its worker was to be started again
            await _cancelled(model.work)
        await self._remove(model)
        self.save()
        self._observe("unloaded", model, time.monotonic() - started)
        logger.info("unloaded model %s", model.name, extra={"fields": {"model": model.name}})

    @staticmethod
    async def _drained(model: Model) -> None:
        while model.in_flight:
            await model.change()

    # Using

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """A loaded model that stays until the request is done. Raises `ModelNotFound`."""
        model = self.get(name)
        model.in_flight += 1
        model.last_used = time.monotonic()
        if model.in_engine and model.connections < min(model.in_flight, model.line.capacity):
            model.connections = model.line.capacity
            self.spawn(self._workers.connect(model))
        try:
            yield model
        finally:
            model.last_used = time.monotonic()
            if model.in_flight > 1:
                model.last_shared = model.last_used
            model.in_flight -= 1
            if model.in_flight == 0:
                model.set()


async def _cancelled(work: asyncio.Task[None]) -> None:
    """Cancels `work` and waits for its end."""
    work.cancel()
    await asyncio.wait({work})
