"""A model's worker, with a Multi Model Server and an engine that are none."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from common.errors import OutOfMemory
from serving.errors import BadRequest, DiskFull, Unavailable, WorkerLost
from serving.mms.client import Answer, MMSClient
from serving.mms.workers import Workers
from serving.models.model import Model
from serving.models.model_settings import ModelSettings
from serving.settings import Settings
from serving.store import Fetched
from tests.processes import has_ended
from tests.serving.fakes import stored

pytestmark = pytest.mark.virtual_time


class FakeMMS:
    """Knows what it was told, by id."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.connections: list[int] = []
        self.hangs = False
        self.outcome: dict[str, Any] = {}  # more of the answer to `probe`
        self.unregistered = asyncio.Event()

    async def register(self, id: str, folder: Path, options: Any, timeout_s: float) -> None:
        self.folders[id] = folder
        if self.hangs:
            await asyncio.Event().wait()
        self.connections.append(options["initial_workers"])

    async def probe(self, id: str, timeout_s: float) -> dict[str, Any]:
        return {"status": 200, "in_engine": True, **self.outcome}

    async def unregister(self, id: str) -> None:
        self.unregistered.set()

    async def socket_number(self, id: str) -> str:
        return "9000"


class FakeEngine:
    def __init__(self) -> None:
        self.checked: list[tuple[Any, ...]] = []
        self.fits = False
        self.together: asyncio.Event | None = None  # what its answers wait for

    async def check(self, *asked: Any) -> int:
        self.checked.append(asked)
        if self.together is not None:
            await self.together.wait()
        if self.fits:
            return 100
        raise OutOfMemory("no room", missing_bytes=7, needed_bytes=100)

    async def unload(self, name: str) -> None:
        pass

    async def models(self) -> list[dict[str, Any]]:
        held = {"reserved_bytes": 60, "row_bytes": 10, "kv_bytes": 5}
        return [{"name": name, **held} for name in ("a#1", "else#9")]


class Parts:
    def __init__(self, folder: Path, engine: FakeEngine | None = None, **settings: Any) -> None:
        self.mms, self.engine = FakeMMS(), engine or FakeEngine()
        self.workers = Workers(Settings(), folder, cast(Any, self.mms), cast(Any, self.engine))
        options = {"response_timeout": 60}
        self.model = Model("a", "a", "1", stored("a"), options, ModelSettings(**settings))
        (folder / "a").mkdir()
        self.model.fetched = Fetched(folder / "a", hit=True)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


@pytest.mark.parametrize("base", [None, "바탕"])
async def test_a_worker_is_told_what_the_engine_is_to_do_and_an_adapters_base(
    tmp_path: Path, base: str | None
) -> None:
    parts = Parts(tmp_path, backend="mxnet", max_rows=3, queue=4)
    parts.model.base = Fetched(Path(base), hit=True) if base else None
    await parts.workers.start(parts.model)
    told = json.loads((parts.mms.folders["1"] / "model.json").read_text())
    expected = {"backend": "mxnet", "max_rows": 3}
    assert told["engine"] == expected | ({"base": base} if base else {})
    with pytest.raises(OutOfMemory):
        await parts.workers.check(parts.model)
    ((*_, backend, precision, _, of_check),) = parts.engine.checked
    assert (backend, precision, of_check) == ("mxnet", None, base)


async def test_a_worker_says_why_a_model_shares_nothing_with_its_base(parts: Parts) -> None:
    parts.model.stored_base = base = stored("바탕")
    parts.model.base = Fetched(Path("바탕"), hit=True)
    parts.mms.outcome = {"whole_because": "its base has other layers"}
    await parts.workers.start(parts.model)
    reason = "its base has other layers"
    assert (parts.model.whole_because, parts.model.shared_base) == (reason, None)
    parts.mms.outcome = {"whole_because": ""}  # at a restart, with the base's new version
    await parts.workers.start(parts.model)
    assert (parts.model.whole_because, parts.model.shared_base) == ("", base)
    parts.model.whole_because, parts.model.base = "its base is not in the store", None
    await parts.workers.start(parts.model)
    assert parts.model.whole_because == "its base is not in the store"


async def test_of_two_that_ask_for_room_at_the_same_time_one_counts_the_other(parts: Parts) -> None:
    parts.engine.fits = True
    parts.engine.together = asyncio.Event()
    other = dataclasses.replace(parts.model, name="봄", id="2")
    checks = [asyncio.create_task(parts.workers.check(model)) for model in (parts.model, other)]
    await asyncio.sleep(1)
    parts.engine.together.set()
    await asyncio.gather(*checks)
    assert [asked[-2] for asked in parts.engine.checked] == [{}, {}, {"a#1": 100}]


async def test_a_worker_begins_with_one_connection_unless_requests_wait_for_it(
    parts: Parts,
) -> None:
    await parts.workers.start(parts.model)
    assert parts.model.line.capacity == 16
    parts.model.in_flight = 2
    await parts.workers.start(parts.model)
    assert parts.mms.connections == [1, 16]


async def test_what_is_the_engines_cannot_be_set_for_a_model_that_it_does_not_hold(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path, precision="int8")
    (tmp_path / "a" / "inference.py").write_text("def model_fn(model_dir): ...")
    with pytest.raises(BadRequest, match="precision cannot be set for model a"):
        await parts.workers.check(parts.model)


async def test_a_worker_whose_process_has_ended_is_not_waited_for(
    parts: Parts, tmp_path: Path
) -> None:
    parts.mms.hangs = True
    parts.model.id = f"봄-{os.getpid()}-1"
    with pytest.raises(WorkerLost):
        await parts.workers.start(parts.model)
    assert asyncio.get_running_loop().time() < 20
    await parts.workers.forget(parts.model)
    assert not list((tmp_path / "workers").iterdir())

    parts.model.id = f"봄-{os.getpid()}-2"
    command = [sys.executable, "-c", "input()", "--model-name", parts.model.id]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        starting = asyncio.create_task(parts.workers.start(parts.model))
        await asyncio.sleep(20)  # it has as long as it needs
        assert not starting.done()
        process.kill()
    with pytest.raises(WorkerLost):
        await starting


@pytest.mark.virtual_time(False)
async def test_a_worker_has_ended_with_what_it_started_when_its_model_is_unloaded(
    parts: Parts, tmp_path: Path
) -> None:
    below = "import subprocess as s, sys; print(s.Popen(['cat']).pid, flush=True); input()"
    parts.model.id = f"봄-{os.getpid()}-3"
    command = [sys.executable, "-c", below, "--model-name", parts.model.id]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        (tmp_path / "workers" / parts.model.id).mkdir()  # as `start` leaves it
        ending = asyncio.create_task(parts.workers.end(parts.model))
        await parts.mms.unregistered.wait()
        for pid in worker.pid, child:
            await asyncio.sleep(0.05)  # however long: it waits
            assert not ending.done()
            os.kill(pid, signal.SIGKILL)
        await ending
        assert all(map(has_ended, (worker.pid, child)))


async def test_a_worker_comes_back_on_a_full_disk(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, os.strerror(28))

    await parts.workers.start(parts.model)
    monkeypatch.setattr(Path, "write_text", full)
    await parts.workers.start(parts.model)
    parts.model.id = "2"  # another one cannot be started, and says why
    with pytest.raises(DiskFull, match="RUN_DIR"):
        await parts.workers.start(parts.model)


BEHIND = "import subprocess as s, sys; s.run([sys.executable, '-c', sys.argv[2]])"
FILLS = "x = b'x' * (20 << 20); print(flush=True); input()"


@pytest.mark.virtual_time(False)
async def test_what_models_hold_is_their_weights_and_caches_and_their_processes_with_children(
    parts: Parts, tmp_path: Path
) -> None:
    models = [
        dataclasses.replace(parts.model, id=str(i), socket=str(tmp_path / f".mms.sock.{i}"))
        for i in range(1, 5)
    ]
    with contextlib.ExitStack() as stack:
        for model in models[:3]:  # the fourth's has ended
            command = [sys.executable, "-c", BEHIND, model.socket, FILLS]
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
            worker = stack.enter_context(subprocess.Popen(command, **pipes))
            assert worker.stdout is not None
            worker.stdout.readline()
        held = await parts.workers.held_bytes(models, False)
    *others, ended = held.values()
    assert all(20 << 20 < size < 200 << 20 for size in others), held
    assert ended == 0
    assert await parts.workers.held_bytes(models, True) == {"1": 75, "2": 0, "3": 0, "4": 0}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"models": 3}', b'{"models": [{}]}'])
async def test_a_list_that_is_none_is_no_answer(body: bytes) -> None:
    class Client(MMSClient):
        def __init__(self) -> None:
            pass

        async def call(self, *_: Any, **__: Any) -> Answer:
            headers: Any = {}
            return Answer(200, headers, body)

    with pytest.raises(Unavailable):
        await Client().names()
    assert await Client().describe("a") in ({}, {"models": 3}, {"models": [{}]})


async def test_folders_of_workers_that_no_model_has_are_removed(parts: Parts) -> None:
    await parts.workers.start(parts.model)
    folder = parts.mms.folders[parts.model.id]
    other = folder.parent / "0a0a-1"
    other.mkdir()
    (other / "model.json").write_text("{}", "utf-8")
    parts.workers.remove_other_folders({parts.model.id})
    assert list(folder.parent.iterdir()) == [folder]
