"""Foreign files are read outside of the engine: what goes wrong with one is that model's alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import Cancelled
from engine.engine import Engine
from engine.prepared import manifest
from engine.sandbox import reading
from engine.sandbox.reading import Reading
from engine.settings import Settings
from tests.engine.engines import WAIT_S, EngineProcess, Request, engine_process, until
from tests.engine.models import make_artifact
from tests.engine.sandbox import targets

LOAD_S = 300.0  # a wide net: a reader lets everyone else go first
BACKENDS = ("mxnet", "native")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is run in sandboxes, by name."""
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_is_prepared_is_loaded_without_a_process(
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


def _given_up(engine: Engine, artifact: Path, reading: Reading) -> type[BaseException]:
    with pytest.raises(Cancelled) as caught:
        engine.load("m", str(artifact), reading=reading)
    return caught.type


def test_a_load_that_is_given_up_ends_and_another_takes_over(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(Settings(backend="native"))
    (artifact / "fault").write_text("wait")
    real = manifest.read
    monkeypatch.setattr(manifest, "read", targets.read)
    first, second = Reading(), Reading()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(_given_up, engine, artifact, first)
        until(lambda: first._child is not None)
        child = first._child
        assert child is not None
        pid = child.pid
        assert pid is not None
        two = pool.submit(engine.load, "m", str(artifact), reading=second)
        monkeypatch.setattr(manifest, "read", real)
        first.cancel()
        assert one.result(WAIT_S) is Cancelled
        assert two.result(WAIT_S).name == "m"
        until(lambda: not psutil.pid_exists(pid))
    assert _given_up(engine, artifact, first) is Cancelled
    engine.close()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[EngineProcess]:
    """A real engine, with a seam that makes the reader of some artifacts fail."""
    with engine_process(tmp_path, "tests.engine.faulty_engine", ENGINE_BACKEND="native") as process:
        yield process


def bad(folder: Path, fault: str) -> Path:
    make_artifact(folder, max_length=64)
    (folder / "fault").write_text(fault)
    return folder


def readers(engine: EngineProcess) -> list[psutil.Process]:
    """The sandboxes' processes, without the helper that forks them."""
    below = psutil.Process(engine.process.pid).children(recursive=True)
    return [p for p in below if p.ppid() != engine.process.pid]


def load(engine: EngineProcess, name: str, folder: Path) -> tuple[int, Any]:
    body = json.dumps({"name": name, "model_dir": str(folder)})
    with closing(engine.connect(LOAD_S)) as connection:
        connection.request("POST", "/models", body.encode())
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.slow
def test_a_crash_a_loop_and_a_bomb_while_eight_clients_use_two_other_models(
    faulty: EngineProcess, tmp_path: Path
) -> None:
    for name, seed in (("소월", 1), ("동주", 2)):
        path = make_artifact(tmp_path / name, max_length=64, seed=seed)
        assert load(faulty, name, path)[0] == 200
    pid = faulty.call("GET", "/statistics")[1]["pid"]
    stop = threading.Event()
    answered = [0] * 8
    statuses: set[int] = set()

    def client(i: int) -> None:
        body = {"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 4}}
        while not stop.is_set():
            name = ("%EC%86%8C%EC%9B%94", "%EB%8F%99%EC%A3%BC")[i % 2]
            statuses.add(faulty.call("POST", f"/models/{name}/generate", body)[0])
            answered[i] += 1

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, i) for i in range(8)]
        try:
            for fault, said in (
                ("crash", "its reader crashed (SIGSEGV)"),
                ("loop", "it took more than 2 s of computing"),
                ("bomb", "it took more than 512 MiB"),
            ):
                before = list(answered)
                status, body = load(faulty, fault, bad(tmp_path / fault, fault))
                assert (status, body["type"]) == (400, "ArtifactError")
                assert body["message"] == f"{fault} could not be read: {said}"
                until(lambda: all(a > b for a, b in zip(answered, before, strict=True)))  # noqa: B023
        finally:
            stop.set()
    for running in clients:
        running.result()
    assert statuses == {200}
    loaded = faulty.call("GET", "/statistics")[1]
    assert loaded["pid"] == pid
    assert {m["name"] for m in loaded["models"]} == {"소월", "동주"}
    until(lambda: len(readers(faulty)) == 1)  # that of both models' texts


def test_a_load_whose_client_goes_ends_its_work(faulty: EngineProcess, tmp_path: Path) -> None:
    folder = bad(tmp_path / "bad", "wait")
    for url in ("/models", "/room"):
        answer: list[Any] = []

        def ask(url: str = url, answer: list[Any] = answer) -> None:
            connection = faulty.connect()
            answer.append(connection)
            connection.request(
                "POST", url, f'{{"name": "bad", "model_dir": "{folder}", "lease": true}}'.encode()
            )

        ask()
        until(lambda: len(readers(faulty)) == 1)
        answer[0].close()
        until(lambda: not readers(faulty))
    (folder / "fault").unlink()
    assert load(faulty, "bad", folder)[0] == 200


def test_a_stop_ends_a_load(faulty: EngineProcess, tmp_path: Path) -> None:
    folder = bad(tmp_path / "bad", "wait")
    connection = faulty.connect()
    connection.request("POST", "/models", f'{{"name": "bad", "model_dir": "{folder}"}}'.encode())
    until(lambda: len(readers(faulty)) == 1)
    [reader] = readers(faulty)
    status = faulty.terminate()
    assert status == 0
    until(lambda: not reader.is_running())
    connection.close()
