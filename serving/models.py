"""The models that are served: fetched, loading, ready, draining, gone.

    absent -> fetching -> loading -> ready -> draining -> absent
                 \\-> failed: the reason goes to whoever asked, and the name is free again

One event loop owns the registry; nothing here is called from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import itertools
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import errors as engine_errors
from engine.async_client import AsyncEngineClient
from engine.errors import EngineError
from serving.errors import (
    Conflict,
    ModelNotFound,
    NoRoom,
    ServingError,
    Timeout,
    Unavailable,
    WorkerFailed,
)
from serving.mms_client import MMSClient
from serving.settings import Settings
from serving.store import Cache, Fetched, StoredModel

logger = logging.getLogger(__name__)

LOADS_AT_ONCE = 2
RECONCILE_S = 1.0
# MMS is given this much longer than the request itself has.
MMS_GRACE_S = 20.0


class State(enum.Enum):
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Model:
    """One name that is served or about to be."""

    name: str
    url: str
    id: str  # MMS's name for it
    stored: StoredModel
    options: Mapping[str, Any]
    state: State = State.FETCHING
    fetched: Fetched | None = None
    in_flight: int = 0
    last_used: float = field(default_factory=time.monotonic)
    restoring: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    @property
    def engine_name(self) -> str:
        """Unlike any other load's, so that a new version can load beside the old one."""
        return f"{self.name}#{self.id}"

    def set(self, state: State | None = None) -> None:
        if state is not None:
            self.state = state
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def change(self) -> None:
        await self._changed.wait()


class Registry:
    """Owns the life of every model."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        mms: MMSClient,
        engine: AsyncEngineClient,
        cache: Cache,
        observe: Callable[[str, Model, float], None] = lambda event, model, seconds: None,
    ) -> None:
        self._settings, self._mms, self._engine, self._cache = settings, mms, engine, cache
        self._slots = run_dir / "slots"
        self._slots.mkdir(parents=True, exist_ok=True)
        self._saved = run_dir / "models.json"
        self._models: dict[str, Model] = {}
        self._numbers = itertools.count(1)
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)
        self._evictions = asyncio.Lock()
        self._observe = observe
        self._tasks: set[asyncio.Task[Any]] = set()

    # Looking

    def models(self) -> list[Model]:
        """All that a list shows: loaded and not on their way out, by name."""
        shown = (State.READY,)
        return sorted((m for m in self._models.values() if m.state in shown), key=lambda m: m.name)

    def get(self, name: str) -> Model:
        """Raises `ModelNotFound`."""
        model = self._models.get(name)
        if model is None or model.state is not State.READY:
            raise ModelNotFound(f"Model not found: {name}")
        return model

    @property
    def in_flight(self) -> int:
        return sum(model.in_flight for model in self._models.values())

    # Loading

    async def load(self, name: str, url: str, stored: StoredModel, **options: Any) -> Model:
        """Loads a model under a free name. Raises `Conflict` for a taken one, and what goes wrong:
        then the name is free again, and neither process nor memory is left."""
        if name in self._models:
            state = self._models[name].state.value
            raise Conflict(f"Model {name} is already registered ({state})")
        model = Model(name, url, f"m{next(self._numbers)}", stored, options)
        self._models[name] = model
        # A client that goes away does not undo the load.
        task = asyncio.create_task(self._load(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

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
        self._save()
        seconds = time.monotonic() - started
        logger.info(
            "loaded model %s from %s in %.2f s", model.name, model.url, seconds,
            extra={"fields": {"model": model.name}},
        )  # fmt: skip
        return model

    async def _fetch_and_start(self, model: Model) -> None:
        async with self._loads:
            started = time.monotonic()
            model.fetched = await asyncio.to_thread(self._cache.acquire, model.stored)
            self._observe("fetched", model, time.monotonic() - started)
            model.set(State.LOADING)
            started = time.monotonic()
            await self._start_worker(model)
            self._observe("loaded", model, time.monotonic() - started)

    async def _start_worker(self, model: Model) -> None:
        """Registers the model with MMS and asks its worker how the load went."""
        assert model.fetched is not None
        slot = self._slots / model.id
        slot.mkdir(exist_ok=True)
        # MMS puts the folder it is told on the worker's import path, before Python's own modules;
        # so it is told an empty one, and the worker reads here where the model is.
        described = {"name": model.name, "engine_name": model.engine_name}
        described["path"] = str(model.fetched.path)
        (slot / "model.json").write_text(json.dumps(described), encoding="utf-8")
        timeout_s = self._settings.load_timeout_s
        await self._mms.register(model.id, slot, model.options, timeout_s)
        outcome = await self._mms.probe(model.id, timeout_s)
        if outcome["status"] != 200:
            raise _load_error(outcome)

    async def _clean_up(self, model: Model) -> None:
        """Leaves no worker, no memory and no slot of a model; each step whatever the others do."""
        with contextlib.suppress(ServingError):
            await self._mms.unregister(model.id)
        with contextlib.suppress(EngineError):
            await self._engine.unload(model.engine_name)
        shutil.rmtree(self._slots / model.id, ignore_errors=True)
        if model.fetched is not None:
            await asyncio.to_thread(self._cache.release, model.fetched.path)

    # Unloading

    async def unload(self, name: str) -> None:
        """Stops new requests, waits for those in flight, frees everything, and only then returns.

        Raises `ModelNotFound`.
        """
        model = self._models.get(name)
        if model is None or model.state is State.DRAINING:
            raise ModelNotFound(f"Model not found: {name}")
        while model.state is not State.READY:  # its load ends first
            await model.change()
            if self._models.get(name) is not model:
                raise ModelNotFound(f"Model not found: {name}")
        task = asyncio.create_task(self._unload(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _unload(self, model: Model) -> None:
        started = time.monotonic()
        model.set(State.DRAINING)
        try:
            limit = self._settings.request_timeout_s + MMS_GRACE_S
            await asyncio.wait_for(self._drained(model), limit)
        except asyncio.TimeoutError:
            logger.error("model %s is unloaded with %d requests left", model.name, model.in_flight)
        await self._clean_up(model)
        del self._models[model.name]
        model.set()
        self._save()
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

    async def ensure(self, name: str, find: Callable[[str], StoredModel]) -> None:
        """Has `name` loaded from the store, unless it is; the least recently used model makes room.

        Raises `ModelNotFound` if the store has none, and what goes wrong with its load.
        """
        while (model := self._models.get(name)) is None or model.state is not State.READY:
            if model is not None:  # another request loads it, or it is being unloaded
                leaving = model.state is State.DRAINING
                while self._models.get(name) is model and model.state is not State.READY:
                    await model.change()
                if model.error is not None and not leaving:
                    raise model.error
                continue
            stored = await asyncio.to_thread(find, name)
            if name in self._models:
                continue
            try:
                await self.load(name, stored.name, stored)
            except (NoRoom, engine_errors.OutOfMemory):
                if not await self._make_room(name):
                    raise

    async def _make_room(self, name: str) -> bool:
        """Unloads the least recently used model, one without requests if there is one.

        A model with requests in flight is drained first: it takes no more of them, so a busy model
        cannot keep a cold one out for ever.
        """
        async with self._evictions:
            ready = [m for m in self.models() if m.name != name and not m.restoring]
            if not ready:
                return False
            victim = min(ready, key=lambda m: (m.in_flight > 0, m.last_used))
            idle_s = time.monotonic() - victim.last_used
            logger.info("model %s makes room for %s (idle for %.1f s)", victim.name, name, idle_s)
            self._observe("evicted", victim, idle_s)
            with contextlib.suppress(ModelNotFound):
                await self.unload(victim.name)
            return True

    # Keeping

    def _save(self) -> None:
        """Writes down what is loaded, for a gateway that is started again."""
        rows = []
        for model in self.models():
            stored = dataclasses.asdict(model.stored)
            row = {"name": model.name, "url": model.url, "id": model.id, "stored": stored}
            rows.append({**row, "options": dict(model.options)})
        fresh = self._saved.with_suffix(".new")
        fresh.write_text(json.dumps(rows), encoding="utf-8")
        fresh.replace(self._saved)

    async def adopt(self) -> None:
        """Takes over what the gateway before this one had loaded, and ends what it had not."""
        try:
            rows = json.loads(self._saved.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            rows = []
        for row in rows:
            stored = StoredModel(**row["stored"])
            model = Model(row["name"], row["url"], row["id"], stored, row["options"])
            number = int(model.id.removeprefix("m"))
            self._numbers = itertools.count(max(number + 1, next(self._numbers)))
            try:
                model.fetched = await asyncio.to_thread(self._cache.acquire, stored)
            except ServingError as error:
                logger.error("model %s is lost: %s", model.name, error.message)
                continue
            model.state = State.READY
            self._models[model.name] = model
        with contextlib.suppress(ServingError, ValueError):
            ours = {model.id for model in self._models.values()}
            for name in await self._mms.names() - ours:
                await self._mms.unregister(name)

    async def reconcile(self) -> None:
        """Runs for ever: gives an MMS that was started again its models back."""
        while True:
            await asyncio.sleep(RECONCILE_S)
            try:
                known = await self._mms.names()
            except (ServingError, ValueError):
                continue
            lost = [m for m in self.models() if m.id not in known and not m.restoring]
            if lost:
                await asyncio.gather(*(self._restore(model) for model in lost))

    async def _restore(self, model: Model) -> None:
        model.restoring = True
        try:
            async with self._loads:
                await self._start_worker(model)
            logger.info("model %s is back", model.name)
        except (ServingError, EngineError) as error:
            logger.error("model %s did not come back yet: %s", model.name, error.message)
            with contextlib.suppress(ServingError):
                await self._mms.unregister(model.id)
        finally:
            model.restoring = False
            model.set()

    async def wait_until_restored(self, model: Model, timeout_s: float) -> None:
        """After MMS lost the model: until it is back. Raises `Unavailable`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._models.get(model.name) is model:
            with contextlib.suppress(ServingError, ValueError):
                if model.id in await self._mms.names() and not model.restoring:
                    return
            await asyncio.sleep(0.2)
        raise Unavailable(f"Model {model.name} is being loaded again", retry_after_s=1)


def _load_error(outcome: Mapping[str, Any]) -> Exception:
    """The worker's reason as an exception, with the engine's own type where it has one."""
    kind = getattr(engine_errors, str(outcome.get("type")), None)
    message = str(outcome.get("message", "the model did not load"))
    if isinstance(kind, type) and issubclass(kind, EngineError):
        return kind(message)
    error = WorkerFailed(message)
    error.status = int(outcome["status"])
    return error
