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
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
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
from serving.memory import check_room
from serving.mms_client import MMSClient
from serving.settings import Settings
from serving.store import Cache, Fetched, StoredModel

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE = 4
LOADS_AT_ONCE = 2
RECONCILE_S = 1.0
LOOK_AGAIN_S = 0.02
# MMS is given this much longer than the request itself has.
MMS_GRACE_S = 20.0
# A model that the engine does not hold for so many looks in a row has lost its worker, or the
# engine has been started again. A request in flight may be loading it: it is given longer.
LOOKS, LOOKS_IN_USE = 3, 20


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
    missed: int = 0  # how often in a row the engine did not hold it
    error: Exception | None = None
    # Set when its worker is given up: requests that wait for that worker try again.
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

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
        # MMS may still know models of a gateway before this one.
        self._ids = (f"{secrets.token_hex(3)}-{number}" for number in itertools.count(1))
        self._fetches = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)
        self._evictions = asyncio.Lock()
        self._unloads = 0  # so far
        self._wanted: Counter[str] = Counter()  # requests that have not begun to use their model
        self._ensuring: dict[str, asyncio.Task[None]] = {}
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

    def engine_names(self) -> dict[str, str]:
        """Names of all models, by their names in the engine."""
        return {model.engine_name: model.name for model in self._models.values()}

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
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
        model = Model(name, url, next(self._ids), stored, options)
        self._models[name] = model
        loaded: Model = await asyncio.shield(self._spawn(self._load(model)))
        return loaded

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
        async with self._fetches:
            started = time.monotonic()
            model.fetched = await self._fetch(model.stored)
            self._observe("fetched", model, time.monotonic() - started)
        async with self._loads:
            model.set(State.LOADING)
            check_room(model.name)
            started = time.monotonic()
            await self._start_worker(model)
            self._observe("loaded", model, time.monotonic() - started)

    async def _fetch(self, stored: StoredModel) -> Fetched:
        thread = asyncio.ensure_future(asyncio.to_thread(self._cache.acquire, stored))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:  # took too long; the thread goes on
            thread.add_done_callback(self._give_back)
            raise

    def _give_back(self, thread: asyncio.Future[Fetched]) -> None:
        if not thread.cancelled() and thread.exception() is None:
            self._cache.release(thread.result().path)

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
        # MMS has one limit for loads and requests; the gateway and the engine keep the requests'.
        limit_s = max(timeout_s, self.request_timeout_s(model) + MMS_GRACE_S)
        options = {**model.options, "response_timeout": int(limit_s)}
        await self._mms.register(model.id, slot, options, timeout_s)
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
        while model is not None and model.state in (State.FETCHING, State.LOADING):
            await model.change()  # its load ends first
            if self._models.get(name) is not model:
                model = None
        if model is None or model.state is State.DRAINING:
            raise ModelNotFound(f"Model not found: {name}")
        model.set(State.DRAINING)
        await asyncio.shield(self._spawn(self._unload(model)))

    async def _unload(self, model: Model) -> None:
        started = time.monotonic()
        try:
            limit = self.request_timeout_s(model) + MMS_GRACE_S
            await asyncio.wait_for(self._drained(model), limit)
        except asyncio.TimeoutError:
            logger.error("model %s is unloaded with %d requests left", model.name, model.in_flight)
        await self._clean_up(model)
        del self._models[model.name]
        self._unloads += 1
        model.set()
        self._save()
        self._observe("unloaded", model, time.monotonic() - started)
        logger.info("unloaded model %s", model.name, extra={"fields": {"model": model.name}})

    @staticmethod
    async def _drained(model: Model) -> None:
        while model.in_flight or model.restoring:
            await model.change()

    # Using

    def request_timeout_s(self, model: Model) -> float:
        """How long an answer of this model may take."""
        return float(model.options.get("response_timeout", self._settings.request_timeout_s))

    @contextlib.asynccontextmanager
    async def use(
        self, name: str, find: Callable[[str], StoredModel] | None = None
    ) -> AsyncIterator[Model]:
        """A loaded model that stays until the request is done; with `find` it is loaded first.

        Raises `ModelNotFound`, and what goes wrong with its load.
        """
        self._wanted[name] += 1
        try:
            if find is not None:
                await self.ensure(name, find)
            model = self.get(name)
            model.in_flight += 1
        finally:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name]
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

        Who asks while it is being loaded waits for that. Raises `ModelNotFound` if the store has
        none, and what goes wrong with its load.
        """
        while (model := self._models.get(name)) is None or model.state is not State.READY:
            task = self._ensuring.get(name)
            if task is None:
                task = self._ensuring[name] = self._spawn(self._load_from_store(name, find))
                task.add_done_callback(lambda _: self._ensuring.pop(name, None))
            await asyncio.shield(task)

    async def _load_from_store(self, name: str, find: Callable[[str], StoredModel]) -> None:
        while (model := self._models.get(name)) is None or model.state is not State.READY:
            if model is not None:  # someone loads it by its url, or it is being unloaded
                await model.change()
                continue
            stored = await asyncio.to_thread(find, name)
            if name in self._models:
                continue
            unloads = self._unloads
            try:
                await self.load(name, stored.name, stored)
            except (NoRoom, engine_errors.OutOfMemory) as error:
                await self._evict_and_load(name, stored, unloads, error)

    async def _evict_and_load(
        self, name: str, stored: StoredModel, unloads: int, error: Exception
    ) -> None:
        """One at a time: who makes room is the one that gets it. Raises `error` if none can be."""
        async with self._evictions:
            while name not in self._models:
                if not await self._make_room(name, unloads):
                    raise error
                unloads = self._unloads
                with contextlib.suppress(NoRoom, engine_errors.OutOfMemory, Conflict):
                    await self.load(name, stored.name, stored)

    async def _make_room(self, name: str, unloads: int) -> bool:
        """Returns once a model has been unloaded that was loaded when `unloads` had been.

        That is the least recently used one, of those without requests if there are any. One with
        requests is drained first: it takes no more of them, so busy models cannot keep a cold one
        out for ever. Says whether there was one.
        """
        while self._unloads == unloads:
            others = [m for m in self._models.values() if m.name != name]
            if not others:
                return False
            # One that has just been loaded serves those who wait for it first.
            ready = [m for m in others if m.state is State.READY and not m.restoring]
            ready = [m for m in ready if m.in_flight or m.name not in self._wanted]
            if not ready:
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
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
            try:
                model.fetched = await asyncio.to_thread(self._cache.acquire, stored)
            except ServingError as error:
                logger.error("model %s is lost: %s", model.name, error.message)
                continue
            model.state = State.READY
            self._models[model.name] = model
        with contextlib.suppress(ServingError, ValueError):
            await self._end_strangers(await self._mms.names())

    async def reconcile(self) -> None:
        """Runs for ever: gives models their workers back that MMS or the engine has lost."""
        while True:
            await asyncio.sleep(RECONCILE_S)
            ready = self.models()
            try:
                known = await self._mms.names()
                statistics = await self._engine.statistics()
            except (ServingError, EngineError, ValueError):
                continue
            held = {str(model["name"]) for model in statistics["models"]}
            lost = [model for model in ready if self._is_lost(model, known, held)]
            for model in lost:
                model.restoring = True
                self._spawn(self._restore(model))
            with contextlib.suppress(ServingError):
                await self._end_strangers(known)
            await asyncio.to_thread(remove_unused_sockets, self._slots.parent)

    @staticmethod
    def _is_lost(model: Model, known: set[str], held: set[str]) -> bool:
        if model.state is not State.READY or model.restoring:
            return False
        model.missed = 0 if model.engine_name in held else model.missed + 1
        return model.id not in known or model.missed >= (LOOKS_IN_USE if model.in_flight else LOOKS)

    async def _end_strangers(self, known: set[str]) -> None:
        """Ends the workers that belong to no model, such as a killed gateway's."""
        for name in known - {model.id for model in self._models.values()}:
            await self._mms.unregister(name)

    async def _restore(self, model: Model) -> None:
        """Starts a new worker. `restoring` is set already, so that no unload comes in between."""
        try:
            async with self._loads:
                with contextlib.suppress(ServingError):
                    await self._mms.unregister(model.id)
                lost, model.lost = model.lost, asyncio.Event()
                lost.set()
                await self._start_worker(model)
            model.missed = 0
            logger.info("model %s is back", model.name)
        except (ServingError, EngineError) as error:
            logger.error("model %s did not come back yet: %s", model.name, error.message)
            with contextlib.suppress(ServingError):
                await self._mms.unregister(model.id)
            if isinstance(error, NoRoom | engine_errors.OutOfMemory):
                self._spawn(self._drop(model))
        finally:
            model.restoring = False
            model.set()

    async def _drop(self, model: Model) -> None:
        """Unloads a model whose memory others have taken while the engine was away."""
        if self._models.get(model.name) is model:
            with contextlib.suppress(ModelNotFound):
                await self.unload(model.name)

    async def wait_until_restored(self, model: Model, timeout_s: float) -> None:
        """After MMS lost the model: until it is back. Raises `Unavailable`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._models.get(model.name) is model:
            with contextlib.suppress(ServingError, ValueError):
                if model.id in await self._mms.names() and not model.restoring:
                    return
            await asyncio.sleep(0.2)
        raise Unavailable(f"Model {model.name} is being loaded again", retry_after_s=1)


def remove_unused_sockets(folder: Path) -> None:
    """Removes the socket files of workers that are gone: MMS leaves one a load.

    Whether one is in use is looked up, not tried: a worker takes a connection for MMS's.
    """
    files = list(folder.glob(".mms.sock.*"))
    if files:
        used = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
        bound = {line.split(maxsplit=7)[-1] for line in used.splitlines()}
        for file in files:
            if str(file) not in bound:
                file.unlink(missing_ok=True)


def _load_error(outcome: Mapping[str, Any]) -> Exception:
    """The worker's reason as an exception, with the engine's own type where it has one."""
    kind = getattr(engine_errors, str(outcome.get("type")), None)
    message = str(outcome.get("message", "the model did not load"))
    if isinstance(kind, type) and issubclass(kind, EngineError):
        return kind(message)
    error = WorkerFailed(message)
    error.status = int(outcome["status"])
    return error
