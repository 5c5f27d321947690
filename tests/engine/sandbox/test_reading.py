"""Foreign files are read outside of the engine: a fault of one concerns its model alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from common.errors import Cancelled
from engine.engine import Engine
from engine.prepared import manifest
from engine.sandbox import reading
from engine.sandbox.reading import Reading
from engine.settings import Settings
from tests.engine.conftest import NewEngine
from tests.engine.engines import WAIT_S, EngineProcess, Request, engine_process
from tests.engine.models import make_artifact
from tests.engine.sandbox import targets
from tests.processes import eventually

LOAD_S = 300.0  # a wide net: a reader is niced


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that run in sandboxes."""
    names: list[str] = []
    real = reading.Sandbox

    def start(target: Any, *arguments: Any, **more: Any) -> Any:
        names.append(target.__name__)
        return real(target, *arguments, **more)

    monkeypatch.setattr(reading, "Sandbox", start)
    return names


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "모델", max_length=64)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_a_prepared_model_is_loaded_without_a_process(
    artifact: Path, started: list[str], backend: str
) -> None:
    for _ in range(2):  # also in an engine that has just started
        engine = Engine(Settings(backend=backend))
        needed = engine.check("m", str(artifact))
        engine.load("m", str(artifact))
        assert engine.budget.weight_bytes == needed
        assert Request(engine, "m", "나 보기가", max_new_tokens=3).wait().error is None
        engine.close()
        assert started == ["read", "build"]


def test_a_cancelled_load_ends_and_another_of_its_name_does_the_work(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, new_engine: NewEngine
) -> None:
    engine = new_engine(backend="native")
    (artifact / "fault").write_text("wait")
    real = manifest.read
    monkeypatch.setattr(manifest, "read", targets.read)
    first = Reading()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(engine.load, "m", str(artifact), reading=first)
        pid = eventually(lambda: first._child).pid
        two = pool.submit(engine.load, "m", str(artifact))
        monkeypatch.setattr(manifest, "read", real)
        first.cancel()
        assert isinstance(one.exception(WAIT_S), Cancelled)
        assert two.result(WAIT_S).name == "m"
        eventually(lambda: not psutil.pid_exists(pid))
    with pytest.raises(Cancelled):
        engine.load("m", str(artifact), reading=first)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("faulty")
    with engine_process(folder, "tests.engine.faulty_engine", ENGINE_BACKEND="native") as found:
        yield found


@pytest.fixture
def faulty(process: EngineProcess) -> Iterator[EngineProcess]:
    """An engine without models in which the reader of some artifacts fails."""
    yield process
    if process.process.poll() is None:  # the last test ends it
        for model in process.call("GET", "/models")[1]["models"]:
            process.call("DELETE", f"/models/{quote(model['name'])}")
        eventually(lambda: not readers(process))


def bad(folder: Path, fault: str) -> Path:
    make_artifact(folder, max_length=64)
    (folder / "fault").write_text(fault)
    return folder


def readers(engine: EngineProcess) -> list[psutil.Process]:
    """The sandboxes' processes, without the helper that forks them."""
    process = psutil.Process(engine.process.pid)
    helpers = process.children()  # `ppid` of one that ends just then would raise
    return [p for p in process.children(recursive=True) if p not in helpers]


def begin(engine: EngineProcess, folder: Path, url: str = "/models", **fields: Any) -> Any:
    """A connection with a load of the folder's name under way."""
    connection = engine.connect(LOAD_S)
    body = {"name": folder.name, "model_dir": str(folder), **fields}
    connection.request("POST", url, json.dumps(body).encode())
    return connection


def load(engine: EngineProcess, folder: Path) -> tuple[int, Any]:
    with closing(begin(engine, folder)) as connection:
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.slow
def test_a_crash_a_loop_and_a_bomb_while_two_other_models_are_used(
    faulty: EngineProcess, tmp_path: Path
) -> None:
    names = ("소월", "동주")
    for seed, name in enumerate(names):
        assert load(faulty, make_artifact(tmp_path / name, max_length=64, seed=seed))[0] == 200
    pid = faulty.call("GET", "/statistics")[1]["pid"]
    request = {"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 4}}
    with ThreadPoolExecutor(1) as pool:
        for fault, reason in (
            ("crash", "its reader crashed (SIGSEGV)"),
            ("loop", "it took more than 2 s of computing"),
            ("bomb", "it took more than 512 MiB"),
        ):
            loading = pool.submit(load, faulty, bad(tmp_path / fault, fault))
            while not loading.done():
                for name in names:
                    url = f"/models/{quote(name)}/generate"
                    assert faulty.call("POST", url, request)[0] == 200
            status, body = loading.result()
            assert (status, body["type"]) == (400, "ArtifactError")
            assert body["message"] == f"the model could not be read: {reason}"
    loaded = faulty.call("GET", "/statistics")[1]
    assert loaded["pid"] == pid
    assert {m["name"] for m in loaded["models"]} == set(names)
    eventually(lambda: len(readers(faulty)) == 1)  # that of both models' texts


def test_a_load_whose_client_disconnects_is_ended(faulty: EngineProcess, tmp_path: Path) -> None:
    folder = bad(tmp_path / "bad", "wait")
    for url in ("/models", "/room"):
        connection = begin(faulty, folder, url, lease=True)
        eventually(lambda: len(readers(faulty)) == 1)
        connection.close()
        eventually(lambda: not readers(faulty))
    (folder / "fault").unlink()
    # Under another name: that of the lease is unloaded some time after it, which may be just now.
    assert load(faulty, folder.rename(tmp_path / "good"))[0] == 200


def test_a_stop_ends_a_load(faulty: EngineProcess, tmp_path: Path) -> None:
    with closing(begin(faulty, bad(tmp_path / "bad", "wait"))):
        [reader] = eventually(lambda: readers(faulty))
        assert faulty.terminate() == 0
        eventually(lambda: not reader.is_running())
