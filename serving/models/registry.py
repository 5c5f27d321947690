"""The registry of models: loads, unloads and names them, and holds them during requests.

    absent -> fetching -> loading -> ready -> draining -> absent
                 \\-> failed: the task of `load` raises the error, and the name is free again

Not thread-safe: one event loop owns the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from common.errors import ArtifactError, NeverFits, OutOfMemory, ServiceError
from common.misnamed import misnamed
from serving.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    Forbidden,
    InsufficientStorage,
    LoadCancelled,
    ModelNotFound,
    Timeout,
    Unavailable,
    WorkerLost,
)
from serving.mms.workers import MMS_GRACE_S, Workers
from serving.models.admission import Line
from serving.models.bases import Base
from serving.models.fetches import Fetches
from serving.models.model import LoadRequest, Model, State, eviction_timeout
from serving.models.model_settings import ModelSettings
from serving.models.worker_memory import check_worker_memory
from serving.settings import Settings
from serving.store import Cache, StoredModel, public_url

logger = logging.getLogger(__name__)

MAX_REQUESTS = 10_000  # remembered load requests; beyond, the oldest is dropped

T = TypeVar("T")
Step = Callable[[], Awaitable[None]]
# Runs a step of a model's load, and may evict other models and repeat the step if it fails.
Attempt = Callable[[Model, Step], Awaitable[None]]


async def load_once(model: Model, step: Step) -> None:
    await step()


FindBase = Callable[[Model], Awaitable[Base]]  # see `Bases.find`


class Registry:
    """The models of the server by name, in every state.

    A load request is remembered until its model is unloaded by another request: an eviction, a new
    version and a restart of the gateway change neither its settings nor its source.

    `save` is called with all ready models and the remembered requests after a change of any,
    `changed` with a model after a change of its state, `observe` with an event, its model and a
    duration in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        workers: Workers,
        cache: Cache,
        observe: Callable[[str, Model, float], None],
        save: Callable[[Iterable[Model], Mapping[str, LoadRequest]], Awaitable[None]],
        changed: Callable[[Model], None],
        find_base: FindBase,
    ) -> None:
        self._settings, self._workers, self.fetches = settings, workers, Fetches(cache)
        self._find_base = find_base
        self._observe, self._save, self._changed = observe, save, changed
        self._models: dict[str, Model] = {}  # by name
        self._fresh: dict[str, Model] = {}  # new versions that are loading, by name
        self._all: list[Model] = []  # with those, and with replaced models that drain
        self._requests: dict[str, LoadRequest] = {}  # by name
        # Ids have a random part, because MMS may still have models of an earlier gateway.
        self._ids = (f"{secrets.token_hex(3)}-{number}" for number in itertools.count(1))
        self._tasks: set[asyncio.Task[Any]] = set()

    # Lookups

    def models(self) -> list[Model]:
        """Return the ready models, sorted by name."""
        ready = (m for m in self._models.values() if m.state is State.READY)
        return sorted(ready, key=lambda m: m.name)

    def all(self) -> list[Model]:
        """Return the models in every state; two of a name while one version replaces another."""
        return list(self._all)

    def find(self, name: str) -> Model | None:
        """Return a model in any state; None if the name is free."""
        return self._models.get(name)

    def get(self, name: str) -> Model:
        """Return a ready model. Raises `ModelNotFound`."""
        model = self.find(name)
        if model is None:
            raise ModelNotFound(f"Model not found: {name}")
        if model.state is not State.READY:
            raise ModelNotFound(f"Model {name} is not ready: it is {model.state.value}")
        return model

    def engine_names(self) -> dict[str, str]:
        """Return the names of all models, by engine name."""
        return {model.engine_name: model.name for model in self._all}

    def loading(self, name: str) -> Model | None:
        """Return the model of this name, or the new version of it, whose load is running."""
        model = self._fresh.get(name) or self.find(name)
        return None if model is None or model.loading is None else model

    def request(self, name: str) -> LoadRequest | None:
        """Return the remembered load request of a model, which may be unloaded since."""
        return self._requests.get(name)

    def requests(self) -> Mapping[str, LoadRequest]:
        """Return the remembered load requests by name."""
        return self._requests

    def remember(self, name: str, request: LoadRequest) -> None:
        """Remembers a load request, unless a load on demand would do the same."""
        self._requests.pop(name, None)
        if request != LoadRequest(name):
            self._requests[name] = request
        if len(self._requests) > MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work` as a task that a disconnect of the client does not cancel."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServiceError):
            logger.error("work on a model failed", exc_info=error)

    async def save(self) -> None:
        """Call the `save` callback; necessary after a change that the snapshot contains."""
        await self._save(self.models(), self._requests)

    # Loading

    def load(
        self,
        name: str,
        request: LoadRequest,
        stored: StoredModel,
        attempt: Attempt = load_once,
    ) -> asyncio.Task[Model]:
        """Register the name and start the load; return its task. Raises `Conflict`.

        The task raises `LoadCancelled` if the model is unloaded meanwhile, and errors of the load,
        after which the name, the worker and the memory are free again.
        """
        if name in self._models:
            state = self._models[name].state.value
            raise Conflict(f"Model {name} is already registered ({state})")
        model = self._models[name] = self._new(name, request, stored)
        return self._begin(model, request, attempt)

    def replace(
        self, old: Model, stored: StoredModel, attempt: Attempt = load_once
    ) -> asyncio.Task[Model]:
        """Start to load another version of a ready model; return the task, as `load` does.

        The old version answers until the new one is ready, and stays if that fails. Where memory
        has no room for both, the old one is unloaded, after the new one's files were checked.
        """
        assert old.state is State.READY
        assert old.name not in self._fresh
        request = self._requests.get(old.name) or LoadRequest(old.url)
        model = self._fresh[old.name] = self._new(old.name, request, stored)
        model.replaces = old
        return self._begin(model, request, attempt)

    def _new(self, name: str, request: LoadRequest, stored: StoredModel) -> Model:
        options = {"response_timeout": self._settings.request_timeout_s, **request.options}
        line, url = Line(max_waiting=self._settings.max_waiting), public_url(request.url)
        return Model(name, url, next(self._ids), stored, options, request.settings, line=line)

    def _begin(self, model: Model, request: LoadRequest, attempt: Attempt) -> asyncio.Task[Model]:
        self._all.append(model)
        model.changed = self._changed
        model.set()
        model.work = asyncio.create_task(self._fetch_and_start(model, attempt))
        model.loading = self.spawn(self._finish_load(model, request, model.work))
        return model.loading

    async def _finish_load(
        self, model: Model, request: LoadRequest, work: asyncio.Task[None]
    ) -> Model:
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
        old, self._models[model.name] = self._models[model.name], model
        self._fresh.pop(model.name, None)
        model.loading = model.replaces = None
        if old is model:
            self.remember(model.name, request)
        model.set(State.READY)
        await self.save()
        if old is not model and old.state is State.READY:
            self.drain(old)
        seconds = time.monotonic() - started
        logger.info(
            "loaded model %s from %s in %.2f s", model.name, model.url, seconds,
            extra={"fields": {"model": model.name}},
        )  # fmt: skip
        return model

    async def _outcome(self, model: Model, work: asyncio.Task[None]) -> Exception | None:
        """Wait for a load, cancelling it after LOAD_TIMEOUT_S. Returns its error, if any."""
        limit_s = self._settings.load_timeout_s
        await asyncio.wait({work}, timeout=limit_s)
        if not work.done():
            shortage, lock = model.shortage, model.fetching.waits_for
            await _cancelled(work)
            if shortage is not None:
                return eviction_timeout(shortage, limit_s)
            if lock is not None:
                return Unavailable(
                    f"Model {model.name} did not load within {limit_s} s (LOAD_TIMEOUT_S): another"
                    f" process holds the lock {lock} in MODEL_CACHE"
                )
            return Timeout(f"Model {model.name} did not load within {limit_s} s (LOAD_TIMEOUT_S)")
        if work.cancelled():
            return LoadCancelled(f"Model {model.name} was unloaded while it was being loaded")
        error = work.exception()
        assert error is None or isinstance(error, Exception)
        return error

    async def _fetch_and_start(self, model: Model, attempt: Attempt) -> None:
        async def fetch() -> None:
            model.fetched, seconds = await self.fetches.fetch(model.stored, model.fetching)
            self._observe("fetched", model, seconds)

        async def fetch_base() -> None:
            assert model.stored_base is not None
            model.base, _ = await self.fetches.fetch(model.stored_base)

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
                        model.id = next(self._ids)  # MMS still has the model under the old id
                        if last:
                            raise
                    except ServiceError as error:
                        await self._workers.end(model)  # before another attempt
                        # Another load may have taken the memory. `check` returns what is missing.
                        if last or not checked or not isinstance(error, OutOfMemory):
                            raise
                model.load_s = time.monotonic() - started
                self._observe("loaded", model, model.load_s)

        async def start_in_place() -> None:
            """Start the model; where memory has no room for two versions, in place of the old."""
            try:
                await attempt(model, start)
            except (InsufficientStorage, OutOfMemory) as error:
                old = model.replaces
                if isinstance(error, NeverFits | DiskFull) or old is None:
                    raise
                logger.info("model %s: memory has no room for both versions", model.name)
                model.replaces = None
                if old.state is State.READY:
                    await asyncio.shield(self.drain(old))
                await attempt(model, start)

        await attempt(model, fetch)
        assert model.fetched is not None
        model.warnings = await asyncio.to_thread(misnamed, model.fetched.path)
        for warning in model.warnings:
            logger.warning("model %s: %s", model.name, warning)
        of_file = await asyncio.to_thread(ModelSettings.read, model.fetched.path)
        model.settings = model.settings.over(of_file)
        if model.settings.queue is not None:
            model.line.max_waiting = model.settings.queue
        base = await self._find_base(model)
        model.stored_base = base.stored
        model.is_adapter, model.is_delta = base.is_adapter, base.is_delta
        model.whole_because = base.whole_because
        if model.stored_base is not None:
            # No other model is evicted from the disk for a base that it can be served without.
            try:
                await (attempt if model.needs_base else load_once)(model, fetch_base)
            except ServiceError as error:
                if model.needs_base:
                    raise
                await self._serve_whole(model, "its base cannot be fetched", error)
        try:
            await start_in_place()
        except (InsufficientStorage, OutOfMemory, ArtifactError) as error:
            if model.base is None or model.needs_base or isinstance(error, DiskFull):
                raise
            reason = "memory has no room for its base, too"
            if isinstance(error, ArtifactError):  # of the base, or else the next start raises it
                reason = "its base cannot be used"
            await self._serve_whole(model, reason, error)
            await attempt(model, start)

    async def _serve_whole(self, model: Model, reason: str, error: ServiceError) -> None:
        """Give up the base of a model that is served whole without it."""
        assert model.stored_base is not None
        base = model.stored_base.name
        logger.info("model %s shares nothing with %s: %s", model.name, base, error.message)
        fetched, model.base, model.stored_base = model.base, None, None
        model.whole_because = reason
        if fetched is not None:
            await self.fetches.release(fetched)

    async def _remove(self, model: Model) -> None:
        """Free the model's worker and artifacts, and then its name, even after an error."""
        try:
            await self._workers.end(model)
            if model.fetched is not None:
                # A refused artifact is fetched again at the next load: it may be replaced by then.
                cancelled = isinstance(model.error, LoadCancelled | Forbidden)
                refused = not cancelled and 400 <= getattr(model.error, "status", 500) < 500
                await self.fetches.release(model.fetched, discard=refused)
            if model.base is not None:
                await self.fetches.release(model.base)
        except Exception:
            logger.exception("model %s was not freed completely", model.name)
        finally:
            self._forget(model)

    def _forget(self, model: Model) -> None:
        """Free the model's name, or leave it to the new version that is loading."""
        self._all.remove(model)
        if self._fresh.get(model.name) is model:
            del self._fresh[model.name]
        elif self._models.get(model.name) is model:
            del self._models[model.name]
            if (fresh := self._fresh.pop(model.name, None)) is not None:
                self._models[model.name] = fresh
        model.set()

    async def adopt(self, model: Model) -> None:
        """Register a model that an earlier gateway has loaded.

        Raises `Conflict` for a taken name, and errors of the fetch of its artifact.
        """
        if self._models.setdefault(model.name, model) is not model:
            raise Conflict(f"Model {model.name} is already registered")
        self._all.append(model)
        model.changed = self._changed
        try:
            model.fetched, _ = await self.fetches.fetch(model.stored)
            if model.stored_base is not None:
                model.base, _ = await self.fetches.fetch(model.stored_base)
        except BaseException:
            self._forget(model)
            if model.fetched is not None:  # it is the base that was not fetched
                await self.fetches.release(model.fetched)
            raise
        model.starts += 1
        model.set(State.READY)

    # Unloading

    async def unload(self, name: str) -> None:
        """Unload a model: reject new requests, wait for those in flight, and free the model.

        Cancels a running load, and forgets the load request. Raises `ModelNotFound`.
        """
        known = self._requests.pop(name, None)
        while (fresh := self._fresh.get(name)) is not None:
            if fresh.work is not None:
                fresh.work.cancel()
            await fresh.change()
        model = self.find(name)
        while model is not None and model.state in (State.FETCHING, State.LOADING):
            if model.work is not None:
                model.work.cancel()
            await model.change()
            if self._models.get(model.name) is not model:
                return
        self._requests.pop(name, None)
        if known is not None and (model is None or model.state is State.DRAINING):
            while model is not None and self.find(name) is model:  # it is being evicted
                await model.change()
            await self.save()
            return
        if model is None:
            raise ModelNotFound(f"Model not found: {name}")
        if model.state is State.DRAINING:
            raise ModelNotFound(f"Model {name} is already being unloaded")
        await asyncio.shield(self.drain(model))

    def drain(self, model: Model) -> asyncio.Task[Any]:
        """Start to unload a ready model, which gets no new requests. Returns the task."""
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
        if model.work is not None:  # the worker is being restarted
            await _cancelled(model.work)
        await self._remove(model)
        await self.save()
        self._observe("unloaded", model, time.monotonic() - started)
        logger.info("unloaded model %s", model.name, extra={"fields": {"model": model.name}})

    @staticmethod
    async def _drained(model: Model) -> None:
        while model.in_flight:
            await model.change()

    # Requests

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """Hold a ready model loaded during a request. Raises `ModelNotFound`."""
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
    """Cancel `work` and wait for its end."""
    work.cancel()
    await asyncio.wait({work})
