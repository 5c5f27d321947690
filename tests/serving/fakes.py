"""Workers, an engine's budget, a store and its cache, all in memory and at the test's command."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from common.errors import NeverFits, OutOfMemory
from serving.api.gateway import Gateway
from serving.api.metrics import Metrics
from serving.console.journal import Journal
from serving.errors import ModelNotInStore
from serving.mms.workers import InEngine
from serving.models.admission import Admission
from serving.models.bases import Base
from serving.models.evictor import Evictor
from serving.models.model import LoadRequest, Model
from serving.models.model_settings import ModelSettings
from serving.models.on_demand import OnDemand
from serving.models.recovery import Recovery
from serving.models.registry import Registry, load_once
from serving.models.snapshot import Snapshot
from serving.settings import Settings
from serving.store import Fetched, StoredModel
from tests.serving.virtual_time import REAL_S, VirtualLoop

START_S = 1.0


def stored(name: str) -> StoredModel:
    return StoredModel(name, f"/store/{name}", "1", 100, "folder")


class FakeWorkers:
    """A fake `serving.mms.workers.Workers`: what MMS has registered and the engine holds, by id."""

    def __init__(self, budget: int = 1000) -> None:
        self.turn = asyncio.Semaphore(2)
        self.budget, self.size = budget, Counter[str]()  # bytes, by name
        self.running: dict[str, Model] = {}
        self.dead: set[str] = set()  # sockets of workers whose processes have ended
        self.in_engine: dict[str, int] = {}  # bytes, by the engine's name
        self.promised: dict[str, int] = {}  # the same, of loads that have asked for room
        self.starts: Counter[str] = Counter()  # by name
        self.ended: list[str] = []  # names
        self.unregistered: list[str] = []  # ids
        self.connected: list[tuple[str, int]] = []  # names, and how many connections each got
        self.errors: dict[str, list[Exception]] = {}  # by name: what its next starts raise
        self.end_s = 0.0
        self.settle_s = 0.0  # from when the engine has a model to when its load has ended
        self.listing_s = 0.0
        self.residency = "hot"  # of all that the engine has
        self.whole_because = ""
        self.hung: set[str] = set()  # names that do not start
        self.starting: set[str] = set()  # ids that cannot be ended
        self.slow: asyncio.Event | None = None  # what `registered` and `held_by_engine` wait for
        self.listing: Exception | None = None
        self._sockets = 0

    def bytes_of(self, model: Model) -> int:
        return self.size[model.name] or 100

    async def check(self, model: Model) -> bool:
        needed = self.bytes_of(model)
        if needed > self.budget:
            raise NeverFits("larger than the engine")
        self.promised.setdefault(model.engine_name, needed)
        before = itertools.takewhile(lambda name: name != model.engine_name, self.promised)
        promised = sum(self.promised[name] for name in before if name not in self.in_engine)
        free = self.budget - sum(self.in_engine.values()) - promised
        if needed > free:
            raise OutOfMemory("no room", missing_bytes=needed - free)
        return True

    def promised_bytes(self, model: Model) -> int:
        return self.promised.get(model.engine_name, 0)

    async def start(self, model: Model) -> None:
        self.starts[model.name] += 1
        self.running[model.id] = model
        await asyncio.sleep(START_S)
        self.promised.pop(model.engine_name, None)
        if model.name in self.hung:
            await asyncio.Event().wait()
        if self.errors.get(model.name):
            raise self.errors[model.name].pop(0)
        self._sockets += 1
        model.socket = f"socket-{self._sockets}"
        self.in_engine[model.engine_name] = self.bytes_of(model)
        await asyncio.sleep(self.settle_s)

    async def connect(self, model: Model) -> None:
        if self.listing is not None:
            model.connections = 1
            raise self.listing
        self.connected.append((model.name, model.connections))

    async def end(self, model: Model) -> None:
        await asyncio.sleep(self.end_s)
        self.promised.pop(model.engine_name, None)
        self.running.pop(model.id, None)
        self.in_engine.pop(model.engine_name, None)
        self.ended.append(model.name)

    async def forget(self, model: Model) -> None:
        self.running.pop(model.id, None)
        self.promised.pop(model.engine_name, None)

    async def unregister(self, id: str) -> None:
        self.unregistered.append(id)
        if id in self.starting:
            await asyncio.Event().wait()
        self.running.pop(id, None)

    async def registered(self) -> set[str]:
        found = set(self.running)
        if self.slow is not None:
            await self.slow.wait()
        if self.listing is not None:
            raise self.listing
        return found

    async def is_registered(self, id: str) -> bool:
        return id in await self.registered()

    async def held_by_engine(self) -> dict[str, InEngine]:
        return dict.fromkeys(self.in_engine, InEngine(self.residency, self.whole_because))

    async def listening(self) -> set[str]:
        return {model.socket for model in self.running.values()} - self.dead

    def works(self, model: Model) -> bool:
        return model.id in self.running and model.socket not in self.dead

    def remove_other_folders(self, ids: set[str]) -> None:
        pass

    def remove_leftovers(self) -> None:
        pass

    async def held_bytes(self, models: Iterable[Model], engine_only: bool) -> dict[str, int]:
        held = {m.id: self.in_engine.get(m.engine_name, 0) for m in models}
        await asyncio.sleep(self.listing_s)
        return held

    def kill(self, model: Model) -> None:
        """Kill the model's worker process, which Multi Model Server still lists."""
        self.dead.add(model.socket)

    def restart_mms(self) -> None:
        """All workers end with it, and it knows of none."""
        self.running.clear()


class FakeCache:
    """A fake `serving.store.Cache`. Its fetches wait for `hung`, in their threads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.in_use = folder, Counter[str]()
        self.hung: dict[str, threading.Event] = {}
        self.discarded: list[str] = []

    def hang(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, self.hung[name] = loop, threading.Event()

    def let_go(self, name: str) -> None:
        """End a fetch that hangs; to be called only then."""
        self._loop.hangs(-1)
        self.hung.pop(name).set()

    def holds(self, model: StoredModel) -> bool:
        return False

    def acquire(self, model: StoredModel, given_up: threading.Event) -> Fetched:
        hung = self.hung.get(model.name)
        if hung is not None:
            self._loop.call_soon_threadsafe(self._loop.hangs, 1)
            assert hung.wait(REAL_S)
        path = self.folder / model.name
        path.mkdir(exist_ok=True)
        self.in_use[model.name] += 1
        return Fetched(path, hit=True)

    def release(self, path: Path, discard: bool = False) -> None:
        self.in_use[path.name] -= 1
        if discard:
            self.discarded.append(path.name)


class FakeLookups:
    """Finds every model of `names`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self.versions = Counter[str]()  # numbers of changes by name

    async def find(self, name: str) -> StoredModel:
        if name not in self.names:
            raise ModelNotInStore(f"Model not found: {name}")
        return dataclasses.replace(stored(name), version=f"{1 + self.versions[name]}", key="")

    async def locate(self, url: str, handler: str | None = None) -> StoredModel:
        return await self.find(url)

    async def models(self) -> list[StoredModel]:
        return [stored(name) for name in sorted(self.names)]


async def find_no_base(model: Model) -> Base:
    return Base()


class Parts:
    """All of them around one registry."""

    def __init__(
        self, folder: Path, budget: int = 1000, names: Iterable[str] = (), **settings: Any
    ) -> None:
        self.settings = Settings(**settings)
        self.workers, self.cache = FakeWorkers(budget), FakeCache(folder)
        self.snapshot = Snapshot(folder)
        workers, cache = cast(Any, self.workers), cast(Any, self.cache)
        self.journal = Journal()
        observe, changed = self.journal.observe, self.journal.changed
        self.registry = Registry(
            self.settings, workers, cache, observe, self.snapshot.write, changed, find_no_base
        )
        self.evictor = Evictor(self.registry, workers, observe)
        self.lookups = FakeLookups(names)
        self.on_demand = OnDemand(self.registry, cast(Any, self.lookups), self.evictor)
        self.recovery = Recovery(self.settings, self.registry, workers, self.snapshot)
        self.recovery.adopted.set()

    def gateway(self, mms: Any, engine: Any, lookups: Any, **more: Any) -> Gateway:
        return Gateway(
            settings=self.settings,
            registry=self.registry,
            on_demand=self.on_demand,
            recovery=self.recovery,
            mms=mms,
            engine=engine,
            lookups=lookups,
            metrics=Metrics(),
            journal=self.journal,
            admission=Admission(now=lambda: time.monotonic()),  # which may be virtual
            **more,
        )

    async def load(self, name: str, **options: Any) -> Model:
        settings, attempt = options.pop("settings", ModelSettings()), options.pop("attempt", None)
        request = LoadRequest(name, settings, options)
        return await asyncio.shield(
            self.registry.load(name, request, stored(name), attempt or load_once)
        )

    def loaded(self) -> list[str]:
        return [model.name for model in self.registry.models()]
