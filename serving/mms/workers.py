"""The worker of each model: started by Multi Model Server, asked how its load went, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import psutil

from common.errors import ArtifactError, EngineError, EngineUnavailable, OutOfMemory, named
from common.trees import remove
from engine.http.async_client import AsyncEngineClient
from handlers.dispatch import is_hosted
from serving.errors import BadRequest, ServingError, WorkerFailed, WorkerLost
from serving.mms.client import MMSClient
from serving.mms.leftovers import remove_leftovers, unix_sockets
from serving.mms.worker_options import worker_options
from serving.models.model import Model
from serving.settings import Settings
from serving.store.disk import raise_disk_full

LOADS_AT_ONCE = 2
# MMS is given this much longer than the request itself has.
MMS_GRACE_S = 20.0
# While a worker starts its process is looked for: one that was there has ended if it is not so
# often; one that was never seen, if it is not for longer than a busy machine takes to start it.
LOOK_S, LOOKS, LOOKS_UNSEEN = 1.5, 3, 10
# A worker and what it has started are killed as one; memory of many gigabytes takes a while.
GONE_S, GONE_LOOK_S = 10.0, 0.005
# Of what the engine says of a model: what it holds of the budget.
ENGINE_PARTS = ("reserved_bytes", "row_bytes", "kv_bytes")

logger = logging.getLogger(__name__)


class Workers:
    """One worker a model, each with a folder, which MMS takes for the model's."""

    def __init__(
        self, settings: Settings, run_dir: Path, mms: MMSClient, engine: AsyncEngineClient
    ) -> None:
        self._settings, self._mms, self._engine = settings, mms, engine
        self._run_dir, self._folders = run_dir, run_dir / "workers"
        self._folders.mkdir(parents=True, exist_ok=True)
        self.turn = asyncio.Semaphore(LOADS_AT_ONCE)  # held while one starts
        # By the engine's name, what each load will take that has asked for room. Whoever asks later
        # does not get it; the engine knows which of them it has begun.
        self._promised: dict[str, int] = {}

    async def check(self, model: Model) -> bool:
        """Raises `OutOfMemory` and what is wrong with a model's settings before a worker is started
        in vain; says whether it could be known.

        From now on its memory is promised to it: until it has started, or `end` is called.
        """
        assert model.fetched is not None
        path = model.fetched.path
        asked = model.settings
        if not is_hosted(path, model.options.get("handler")):  # and need not use the engine
            if engine := asked.of_engine():
                raise BadRequest(
                    f"{' and '.join(engine)} cannot be set for model {model.name}: the engine does"
                    " not compute it"
                )
            return False
        name, needed = model.engine_name, 0
        before: dict[str, int] | None = None
        # Those that were promised theirs while the engine was asked come before it, too.
        while before is None or self._promised_before(name).keys() - before:
            before = self._promised_before(name)
            try:
                needed = await self._engine.check(
                    model.name, str(path), asked.backend, asked.precision, before, _base(model)
                )
            except OutOfMemory as error:
                needed = error.needed_bytes
                raise
            except (ArtifactError, EngineUnavailable):  # its worker knows more
                return False
            finally:
                if needed:
                    self._promised.setdefault(name, needed)
        return True

    def _promised_before(self, name: str) -> dict[str, int]:
        return dict(itertools.takewhile(lambda row: row[0] != name, self._promised.items()))

    def promised_bytes(self, model: Model) -> int:
        """What a load that waits for room or has begun will take of the engine's memory."""
        return self._promised.get(model.engine_name, 0)

    async def start(self, model: Model) -> None:
        """Registers a fetched model with MMS and asks its worker how the load went.

        Raises that: `EngineError`, `InsufficientStorage`, `WorkerFailed`. Then `end` is due.
        """
        assert model.fetched is not None
        path = model.fetched.path
        asked = dict(model.options)
        if model.settings.max_rows is not None:
            asked.setdefault("initial_workers", model.settings.max_rows)
        options, handler = worker_options(path, asked, self._settings)
        folder = self._folders / model.id
        # MMS puts the folder it is told on the worker's import path, before Python's own modules;
        # so it is told an empty one, and the worker reads here where the model is.
        described: dict[str, Any] = {"name": model.name, "engine_name": model.engine_name}
        described["path"] = str(path)
        if handler is not None:
            described["handler"] = handler
        engine = model.settings.of_engine()
        if model.base is not None:
            engine["base"] = _base(model)
        if engine:
            described["engine"] = engine
        hosted = is_hosted(path, handler)
        await asyncio.to_thread(_describe, folder, described, hosted)
        timeout_s = self._settings.load_timeout_s
        # MMS has one limit for loads and requests; the gateway and the engine keep the requests'.
        limit_s = max(timeout_s, model.request_timeout_s + MMS_GRACE_S)
        options["response_timeout"] = int(limit_s)
        capacity = options["initial_workers"] * options.get("batch_size", 1)
        if hosted and "initial_workers" not in model.options and model.in_flight < 2:
            options["initial_workers"] = 1  # each is a thread of MMS's; see `connect`
        model.connections = options["initial_workers"]
        await self._register(model.id, folder, options, timeout_s)
        outcome = await self._mms.probe(model.id, timeout_s)
        if outcome["status"] != 200:
            raise _load_error(outcome)
        self._promised.pop(model.engine_name, None)
        model.in_engine = bool(outcome["in_engine"])
        model.residency = "hot" if model.in_engine else ""
        model.metadata = outcome.get("metadata", {})
        model.batch_size = options.get("batch_size", 1)
        model.line.capacity = capacity
        model.socket = str(self._run_dir / f".mms.sock.{await self._mms.socket_number(model.id)}")

    async def _register(
        self, id: str, folder: Path, options: Mapping[str, Any], timeout_s: float
    ) -> None:
        """Raises `WorkerLost` soon after the worker's process has ended without a word: Multi Model
        Server waits for it for a minute, and then forgets the model."""
        registered = asyncio.ensure_future(self._mms.register(id, folder, options, timeout_s))
        unseen, looks = 0, LOOKS_UNSEEN
        try:
            while unseen < looks:
                await asyncio.wait({registered}, timeout=LOOK_S)
                if registered.done():
                    return await registered
                unseen += 1
                if await asyncio.to_thread(has_process, id):
                    unseen, looks = 0, LOOKS
        finally:
            registered.cancel()
        raise WorkerLost("the model's worker ended as soon as it was started")

    async def forget(self, model: Model) -> None:
        """Leaves nothing of a worker that was lost, and which has left nothing behind."""
        self._promised.pop(model.engine_name, None)
        await asyncio.to_thread(remove, self._folders / model.id)

    async def connect(self, model: Model) -> None:
        """Has MMS open or close the connections that `model.connections` says.

        One that has a request is not to be closed. Raises `Unavailable`, `Timeout`; then there may
        be as few as one.
        """
        try:
            await self._mms.scale(model.id, model.connections, model.connections)
        except ServingError:
            model.connections = 1
            raise

    async def end(self, model: Model) -> None:
        """Leaves no worker, memory or folder of a model; each step whatever the others do."""
        self._promised.pop(model.engine_name, None)
        folder = self._folders / model.id
        processes: list[psutil.Process] = []
        # What a hosted one takes is in the host and the engine; without a folder none was started.
        if folder.exists() and not (folder / "hosted").exists():
            processes = await asyncio.to_thread(_processes_of, model.id)
        with contextlib.suppress(ServingError):
            await self._mms.unregister(model.id)
            await _ended(processes)
        with contextlib.suppress(EngineError):
            await self._engine.unload(model.engine_name)
        await asyncio.to_thread(remove, folder)

    def remove_other_folders(self, ids: Set[str]) -> None:
        """Of workers that are not among these, such as those that a killed gateway was loading."""
        for folder in self._folders.iterdir():
            if folder.name not in ids:
                remove(folder)

    async def unregister(self, id: str) -> None:
        """Ends a worker and leaves the rest, for one that is started again or belongs to no model.

        Raises `Unavailable`, `Timeout`.
        """
        await self._mms.unregister(id)

    async def registered(self) -> set[str]:
        """The ids of all that MMS has. Raises `ServingError`."""
        return await self._mms.names()

    async def is_registered(self, id: str) -> bool:
        """Whether MMS has it. Raises `ServingError`."""
        return bool(await self._mms.describe(id))

    async def held_by_engine(self) -> dict[str, str]:
        """By the engine's names of the models that it holds: whether each is hot or parked.

        Raises `EngineError`.
        """
        return {model["name"]: model["residency"] for model in await self._engine.models()}

    async def held_bytes(self, models: Iterable[Model], engine_only: bool) -> dict[str, int]:
        """By id, the memory that each of the loaded `models` holds: in the engine, and unless
        `engine_only` in its own processes. Raises `EngineError`."""
        found = Counter({model.id: 0 for model in models})
        ids = {model.engine_name: model.id for model in models}
        for held in await self._engine.models():
            if held["name"] in ids:
                found[ids[held["name"]]] += sum(held[part] for part in ENGINE_PARTS)
        if not engine_only:
            sockets = {model.socket: model.id for model in models}
            for socket, size in (await asyncio.to_thread(_process_bytes, set(sockets))).items():
                found[sockets[socket]] += size
        return found

    @staticmethod
    async def listening() -> set[str]:
        """The sockets that workers listen on. The kernel closes one when the last process of its
        worker has ended, however it did, and not before."""
        # On a thread: the kernel lists every unix socket of the machine, thousands at times.
        sockets = await asyncio.to_thread(unix_sockets)
        return {path for path, listens in sockets if listens}

    def remove_leftovers(self) -> None:
        remove_leftovers(self._run_dir)


def _base(model: Model) -> str | None:
    """The folder of an adapter's base."""
    return None if model.base is None else str(model.base.path)


def _process_bytes(sockets: Set[str]) -> dict[str, int]:
    """By socket, what goes with the worker that listens there and all that it has started: what no
    file holds. What they share counts for each. Each process is looked at once: there are as many
    as models."""
    sizes: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    workers: defaultdict[str, list[int]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended
            memory = process.memory_info()
            sizes[process.pid] = memory.rss - memory.shared
            children[process.ppid()].append(process.pid)
            for socket in sockets & set(process.cmdline()):
                workers[socket].append(process.pid)

    def tree_bytes(pid: int) -> int:
        return sizes[pid] + sum(map(tree_bytes, children[pid]))

    return {socket: max(map(tree_bytes, pids)) for socket, pids in workers.items()}


def has_process(id: str) -> bool:
    """Whether there is the process of a worker."""
    return next(_with_argument(id), None) is not None


def _with_argument(id: str) -> Iterator[int]:
    """The processes of a worker, which have this among their arguments."""
    wanted = f"\0{id}\0".encode()
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if wanted in command_line.read_bytes():
                yield int(command_line.parent.name)


def _processes_of(id: str) -> list[psutil.Process]:
    """A worker's, and all that they have started."""
    found = set()
    for pid in _with_argument(id):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return [*found]


async def _ended(processes: Iterable[psutil.Process]) -> None:
    """Waits for processes that have been killed, until their memory is free."""
    end = asyncio.get_running_loop().time() + GONE_S
    while left := [process for process in processes if _lives(process)]:
        if asyncio.get_running_loop().time() >= end:
            logger.error("of an unloaded model's processes %s are left", [p.pid for p in left])
            return
        await asyncio.sleep(GONE_LOOK_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _describe(folder: Path, described: Mapping[str, Any], hosted: bool) -> None:
    """Leaves as it is what says this already: its worker comes back on a full disk, too.

    Raises `DiskFull`.
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
    """The worker's reason as an exception, with the engine's own type where it has one."""
    message = str(outcome.get("message", "the model did not load"))
    if (known := named(outcome.get("type"), message)) is not None:
        return known
    error = WorkerFailed(message)
    error.status = int(outcome["status"])
    return error
