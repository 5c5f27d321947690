"""Starts and ends the workers of models through Multi Model Server (MMS)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from common.errors import ArtifactError, EngineError, EngineUnavailable, OutOfMemory, named
from common.trees import remove
from engine.http.async_client import AsyncEngineClient
from handlers.dispatch import is_hosted
from serving.errors import BadRequest, ServingError, WorkerFailed, WorkerLost
from serving.mms.client import MMSClient
from serving.mms.leftovers import remove_leftovers, unix_sockets
from serving.mms.worker_options import worker_options
from serving.mms.worker_processes import has_process, private_bytes, processes_of, wait_for_exit
from serving.models.model import Model
from serving.settings import Settings
from serving.store.disk import raise_disk_full

LOADS_AT_ONCE = 2
MMS_GRACE_S = 20.0  # added to a request's limit, so that the gateway times out before MMS
# While a worker starts, its process is polled. The worker counts as lost once a process that was
# seen is missing in MISSING_POLLS polls in a row, or none was seen in UNSEEN_POLLS polls. More
# polls: a lost worker is noticed later. Fewer: a slow start on a busy machine is taken for an exit.
START_POLL_S, MISSING_POLLS, UNSEEN_POLLS = 1.5, 3, 10
# Counters of a model in the engine whose sum is the model's share of the engine's budget.
ENGINE_PARTS = ("reserved_bytes", "row_bytes", "kv_bytes")

logger = logging.getLogger(__name__)


class InEngine(NamedTuple):
    """A model in the engine.

    residency: hot or parked
    whole_because: why it shares nothing with the base that it was loaded with, or ""
    """

    residency: str
    whole_because: str


class Workers:
    """Manages one worker per model. MMS gets a folder per worker in place of the model's own."""

    def __init__(
        self, settings: Settings, run_dir: Path, mms: MMSClient, engine: AsyncEngineClient
    ) -> None:
        self._settings, self._mms, self._engine = settings, mms, engine
        self._run_dir, self._folders = run_dir, run_dir / "workers"
        self._folders.mkdir(parents=True, exist_ok=True)
        self.turn = asyncio.Semaphore(LOADS_AT_ONCE)  # held while a worker starts
        # Bytes that each pending load needs, by engine name, in order of `check`. They are reserved
        # against later loads; the engine knows which of these loads it has begun.
        self._promised: dict[str, int] = {}

    async def check(self, model: Model) -> bool:
        """Check a model's settings and memory before its worker is started.

        Returns true if the engine has checked the model. Its memory is then reserved until `start`
        succeeds, or `end` or `forget` is called. Raises `OutOfMemory`, `BadRequest`.
        """
        assert model.fetched is not None
        path = model.fetched.path
        settings = model.settings
        if not is_hosted(path, model.options.get("handler")):  # its own code computes it
            if engine := settings.of_engine():
                raise BadRequest(
                    f"{' and '.join(engine)} cannot be set for model {model.name}: the engine does"
                    " not compute it"
                )
            return False
        name, needed = model.engine_name, 0
        before: dict[str, int] | None = None
        # Repeat if an earlier load has reserved memory during the call.
        while before is None or self._promised_before(name).keys() - before:
            before = self._promised_before(name)
            try:
                needed = await self._engine.check(
                    model.name,
                    str(path),
                    settings.backend,
                    settings.precision,
                    before,
                    _base(model),
                )
            except OutOfMemory as error:
                needed = error.needed_bytes
                raise
            except (ArtifactError, EngineUnavailable):  # `start` raises the worker's error
                return False
            finally:
                if needed:
                    self._promised.setdefault(name, needed)
        return True

    def _promised_before(self, name: str) -> dict[str, int]:
        return dict(itertools.takewhile(lambda row: row[0] != name, self._promised.items()))

    def promised_bytes(self, model: Model) -> int:
        """Return the bytes of the engine's memory that are reserved for a model's pending load."""
        return self._promised.get(model.engine_name, 0)

    async def start(self, model: Model) -> None:
        """Register a fetched model with MMS and wait for its worker's load.

        Raises `EngineError`, `InsufficientStorage`, `WorkerFailed`; after these, call `end`.
        """
        assert model.fetched is not None
        path = model.fetched.path
        requested = dict(model.options)
        if model.settings.max_rows is not None:
            requested.setdefault("initial_workers", model.settings.max_rows)
        options, handler = worker_options(path, requested, self._settings)
        folder = self._folders / model.id
        # MMS puts the registered folder on the worker's import path, before Python's own modules.
        # So it gets a folder without modules, in which model.json has the model's path.
        described: dict[str, Any] = {"name": model.name, "engine_name": model.engine_name}
        described |= {"path": str(path), "handler": handler}
        engine = model.settings.of_engine() | {"base": _base(model)}
        described["engine"] = {name: value for name, value in engine.items() if value is not None}
        hosted = is_hosted(path, handler)
        await asyncio.to_thread(_describe, folder, described, hosted)
        timeout_s = self._settings.load_timeout_s
        # MMS has one limit for loads and requests; the gateway and the engine limit requests.
        limit_s = max(timeout_s, model.request_timeout_s + MMS_GRACE_S)
        options["response_timeout"] = int(limit_s)
        capacity = options["initial_workers"] * options.get("batch_size", 1)
        if hosted and "initial_workers" not in model.options and model.in_flight < 2:
            options["initial_workers"] = 1  # each costs MMS a thread; `connect` adds more on demand
        model.connections = options["initial_workers"]
        await self._register(model.id, folder, options, timeout_s)
        outcome = await self._mms.probe(model.id, timeout_s)
        if outcome["status"] != 200:
            raise _load_error(outcome)
        self._promised.pop(model.engine_name, None)
        model.in_engine = bool(outcome["in_engine"])
        model.residency = "hot" if model.in_engine else ""
        model.metadata = outcome.get("metadata", {})
        if model.base is not None:
            model.whole_because = outcome.get("whole_because", "")
        model.batch_size = options.get("batch_size", 1)
        model.line.capacity = capacity
        model.socket = str(self._run_dir / f".mms.sock.{await self._mms.socket_number(model.id)}")

    async def _register(
        self, id: str, folder: Path, options: Mapping[str, Any], timeout_s: float
    ) -> None:
        """Register a model with MMS. Raises `WorkerLost` soon after its worker has exited.

        MMS itself would wait a minute for the worker and then drop the model.
        """
        registered = asyncio.ensure_future(self._mms.register(id, folder, options, timeout_s))
        missing, limit = 0, UNSEEN_POLLS
        try:
            while missing < limit:
                await asyncio.wait({registered}, timeout=START_POLL_S)
                if registered.done():
                    return await registered
                missing += 1
                if await asyncio.to_thread(has_process, id):
                    missing, limit = 0, MISSING_POLLS
        finally:
            registered.cancel()
        raise WorkerLost("the model's worker ended as soon as it was started")

    async def forget(self, model: Model) -> None:
        """Remove the folder and reservation of a worker whose process has exited."""
        self._promised.pop(model.engine_name, None)
        await asyncio.to_thread(remove, self._folders / model.id)

    async def connect(self, model: Model) -> None:
        """Make MMS open or close connections to a worker, to have `model.connections` of them.

        Requests on closed connections fail, so decrease the number only while there are none.
        Raises `Unavailable`, `Timeout`; the number is then unknown, and 1 is assumed.
        """
        try:
            await self._mms.scale(model.id, model.connections, model.connections)
        except ServingError:
            model.connections = 1
            raise

    async def end(self, model: Model) -> None:
        """Free a model's worker, memory and folder. Errors of MMS and the engine are ignored."""
        self._promised.pop(model.engine_name, None)
        folder = self._folders / model.id
        processes: list[psutil.Process] = []
        # A hosted worker has no process of its own. Without a folder, no worker was started.
        if folder.exists() and not (folder / "hosted").exists():
            processes = await asyncio.to_thread(processes_of, model.id)
        with contextlib.suppress(ServingError):
            await self._mms.unregister(model.id)
            await wait_for_exit(processes)
        with contextlib.suppress(EngineError):
            await self._engine.unload(model.engine_name)
        await asyncio.to_thread(remove, folder)

    def remove_other_folders(self, ids: Set[str]) -> None:
        """Remove the folders of workers not in `ids`, such as those of a killed gateway."""
        for folder in self._folders.iterdir():
            if folder.name not in ids:
                remove(folder)

    async def unregister(self, id: str) -> None:
        """End a worker and free nothing else, for a restart or for a worker without a model.

        Raises `Unavailable`, `Timeout`.
        """
        await self._mms.unregister(id)

    async def registered(self) -> set[str]:
        """Return the ids of the models that MMS has. Raises `ServingError`."""
        return await self._mms.names()

    async def is_registered(self, id: str) -> bool:
        """Return whether MMS has the model with this id. Raises `ServingError`."""
        return bool(await self._mms.describe(id))

    async def held_by_engine(self) -> dict[str, InEngine]:
        """Return the models in the engine, by engine name. Raises `EngineError`."""
        return {
            model["name"]: InEngine(model["residency"], model.get("whole_because", ""))
            for model in await self._engine.models()
        }

    async def held_bytes(self, models: Iterable[Model], engine_only: bool) -> dict[str, int]:
        """Return the bytes of memory of each of the loaded `models`, by id.

        `engine_only`: without the memory of the workers' processes. Raises `EngineError`.
        """
        sizes = Counter({model.id: 0 for model in models})
        ids = {model.engine_name: model.id for model in models}
        for held in await self._engine.models():
            if held["name"] in ids:
                sizes[ids[held["name"]]] += sum(held[part] for part in ENGINE_PARTS)
        if not engine_only:
            sockets = {model.socket: model.id for model in models}
            for socket, size in (await asyncio.to_thread(private_bytes, set(sockets))).items():
                sizes[sockets[socket]] += size
        return sizes

    @staticmethod
    async def listening() -> set[str]:
        """Return the paths of all listening unix sockets of the machine.

        A worker's socket listens until the worker's last process has ended.
        """
        # Read on a thread: the list has all unix sockets of the machine, up to thousands.
        sockets = await asyncio.to_thread(unix_sockets)
        return {path for path, listens in sockets if listens}

    def remove_leftovers(self) -> None:
        remove_leftovers(self._run_dir)


def _base(model: Model) -> str | None:
    """Return the folder of a model's base; None if it has none."""
    return None if model.base is None else str(model.base.path)


def _describe(folder: Path, described: Mapping[str, Any], hosted: bool) -> None:
    """Write the worker's model.json. Raises `DiskFull`.

    An unchanged file is not written, so that a restart works on a full disk.
    """
    text, file = json.dumps(described), folder / "model.json"
    with contextlib.suppress(OSError):
        if file.read_text(encoding="utf-8") == text:
            return
    with raise_disk_full(f"the worker's folder of {described['name']} in RUN_DIR"):
        folder.mkdir(exist_ok=True)
        if hosted:
            (folder / "hosted").touch()
        file.write_text(text, encoding="utf-8")


def _load_error(outcome: Mapping[str, Any]) -> Exception:
    """Convert the error of a worker's load to an exception, of the engine's type if it has one."""
    message = str(outcome.get("message", "the model did not load"))
    if (known := named(outcome.get("type"), message)) is not None:
        return known
    error = WorkerFailed(message)
    error.status = int(outcome["status"])
    return error
