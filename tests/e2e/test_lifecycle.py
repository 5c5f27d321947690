"""What a model's own settings do, loads that are ended, and stops and engines that hang."""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, error, serving, small, statistics, text
from tests.processes import has_ended

pytestmark = pytest.mark.slow

WORKER = "--sock-name"
HANGS = "import time\ndef model_fn(model_dir):\n    time.sleep(600)\n"


@pytest.fixture(scope="module")
def store(clean: Server) -> Path:
    folder = clean.store
    for seed, name in enumerate(("a", "b", "봄")):
        small(folder / name, seed)
    (folder / "봄" / "serving.json").write_text(
        json.dumps({"precision": "int8", "max_rows": 2, "idle_unload_s": 3600, "timeout_s": 7})
    )
    (folder / "hangs" / "code").mkdir(parents=True)
    (folder / "hangs" / "code" / "inference.py").write_text(HANGS)
    return folder


@pytest.fixture(scope="module")
def server(clean: Server, store: Path) -> Server:
    return clean


def described(server: Server, name: str) -> dict[str, object]:
    found: dict[str, object] = server.get(f"/models/{name}").json()
    return found


def test_a_models_own_settings_come_from_its_file_and_its_request(server: Server) -> None:
    assert server.load("봄", pinned=True, timeout_s=9).status_code == 200
    assert described(server, "봄")["settings"] == {
        "pinned": True, "precision": "int8", "max_rows": 2, "timeout_s": 9, "idle_unload_s": 3600,
    }  # fmt: skip
    (held,) = statistics(server)["models"]
    assert (held["backend"], held["precision"]) == ("native", "int8")
    text(server.predict("봄", SHORT))
    server.unload("봄")
    with_query = server.management("/models?url=a&pinned=true&backend=mxnet&precision=fp32")
    assert requests.post(with_query, timeout=60).status_code == 200
    assert statistics(server)["models"][0]["backend"] == "mxnet"
    server.unload("a")


def test_an_unload_ends_a_load_that_hangs(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(server.load, "hangs")
        eventually(lambda: server.descendants(WORKER))
        eventually(lambda: len(server.descendants("user_code/child.py")) > 0)
        assert server.unload("hangs").status_code == 200
        assert error(load.result()) == (409, "ConflictStatusException")
        eventually(lambda: not server.descendants(WORKER))
        eventually(lambda: not server.descendants("user_code/child.py"))
    assert error(server.unload("hangs"))[0] == 404
    assert text(server.predict("a", SHORT))


def test_a_stop_is_bounded_while_a_worker_and_a_fetch_hang(store: Path, tmp_path: Path) -> None:
    small(store / "pipe")
    os.mkfifo(store / "pipe" / "generation.json")
    with serving(tmp_path, store, DRAIN_S="2") as server, ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(quietly, server, name) for name in ("hangs", "pipe") * 2]
        eventually(lambda: server.descendants(WORKER))
        below = server.descendants()
        assert server.stop() == 0
        assert not [p for p in below if not has_ended(p)]
        for load in loads:
            load.result()


def quietly(server: Server, name: str) -> None:
    with contextlib.suppress(requests.RequestException):
        server.predict(name, SHORT)


def test_processes_that_hang_are_started_again(server: Server) -> None:
    before = text(server.predict("a", SHORT))
    for program in "-m engine ", "-m handlers.host ", "ModelServer", "serving.gateway":
        server.descendants(program)[0].suspend()
    for name in "the engine", "the workers' host", "Multi Model Server", "the gateway":
        eventually(lambda name=name: f"{name} has not worked for 15 s" in server.text())
    eventually(lambda: server.is_ready() and server.predict("a", SHORT).status_code == 200)
    assert text(server.predict("a", SHORT)) == before
