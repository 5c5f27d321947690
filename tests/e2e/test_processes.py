"""The server's processes: how they start, end, and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

from tests.e2e.server import REPOSITORY, Server, eventually, free_port

PROMPT = {"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 8}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_five_seconds_and_leaves_no_process(
    own_server: Server, number: int
) -> None:
    own_server.load("sowol")
    own_server.load("dongju")
    below = own_server.descendants()
    assert len(below) >= 5
    started = time.monotonic()
    assert own_server.stop(number) == 0
    assert time.monotonic() - started < 5
    assert not [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_when_java_dies_it_says_so_and_the_models_come_back(own_server: Server) -> None:
    own_server.load("sowol")
    before = own_server.predict("sowol", PROMPT).json()["generated_text"]
    own_server.descendants("ModelServer")[0].kill()
    answer = own_server.predict("sowol", PROMPT)
    assert answer.json()["generated_text"] == before
    assert "Multi Model Server ended" in own_server.text()


def test_a_killed_gateway_comes_back_and_knows_its_models(own_server: Server) -> None:
    own_server.load("소월", "sowol")
    before = own_server.predict("소월", PROMPT).json()["generated_text"]
    own_server.descendants("serving.gateway")[0].kill()
    eventually(lambda: "the gateway was killed by SIGKILL" in own_server.text())
    eventually(own_server.is_ready)
    assert own_server.predict("소월", PROMPT).json()["generated_text"] == before
    assert own_server.unload("소월").status_code == 200
    eventually(lambda: not own_server.descendants("model_service_worker"))


def test_a_killed_engine_comes_back_with_its_models(own_server: Server) -> None:
    own_server.load("sowol")
    before = own_server.predict("sowol", PROMPT).json()["generated_text"]
    own_server.descendants("-m engine ")[0].kill()
    assert own_server.predict("sowol", PROMPT).json()["generated_text"] == before
    assert "the engine was killed by SIGKILL" in own_server.text()


@pytest.mark.parametrize("which", ["model_service_worker", "handlers.host"])
def test_a_killed_worker_comes_back(own_server: Server, which: str) -> None:
    own_server.load("sowol")
    before = own_server.predict("sowol", PROMPT).json()["generated_text"]
    own_server.descendants(which)[0].kill()

    def answers() -> bool:
        answer = own_server.predict("sowol", PROMPT)
        return answer.status_code == 200 and answer.json()["generated_text"] == before

    eventually(answers, 20)


def test_an_artifact_that_does_not_load_leaves_its_name_free_and_no_process(tmp_path: Path) -> None:
    broken = tmp_path / "store" / "고장"
    broken.mkdir(parents=True)
    (broken / "model.params").write_bytes(b"not a model")
    server = Server(tmp_path, tmp_path / "store").wait_until_ready()
    try:
        for _ in range(2):
            answer = server.load("broken", "고장")
            assert answer.status_code == 400
            assert "*.spiece" in answer.json()["message"]
            eventually(lambda: not server.descendants("model_service_worker"))
    finally:
        server.stop()


def run_entrypoint(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serving.entrypoint", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_another_command_is_run_as_it_is() -> None:
    done = run_entrypoint("bash", "-c", "echo 안녕; exit 7")
    assert (done.returncode, done.stdout) == (7, "안녕\n")
    assert run_entrypoint("no-such-command").returncode == 127


@pytest.mark.parametrize("option", ["--port", "--management-port"])
def test_a_taken_port_is_reported_at_once(option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_entrypoint("serve", "--host", "127.0.0.1", option, port)
    assert done.returncode == 1
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_no_java_is_reported_at_once() -> None:
    done = run_entrypoint("serve", "--host", "127.0.0.1", JAVA_HOME="/nowhere")
    assert done.returncode == 1
    assert "Java" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SAGEMAKER_BIND_TO_PORT", "http"), ("MANAGEMENT_PORT", "70000"), ("MODEL_STORE", "/nowhere")],
)
def test_a_bad_setting_is_named(variable: str, value: str) -> None:
    done = run_entrypoint("serve", "--host", "127.0.0.1", **{variable: value})
    assert done.returncode == 1
    assert variable in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_killed_server_left_does_not_matter_to_the_next(tmp_path: Path) -> None:
    server = Server(tmp_path, REPOSITORY / "model_store").wait_until_ready()
    assert server.run_dir.stat().st_mode & 0o777 == 0o700
    server.load("sowol")
    below = server.descendants()
    for process in [psutil.Process(server.process.pid), *below]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
    run_dir = server.run_dir
    assert list(run_dir.glob("slots/*"))
    (run_dir / ".model_server.pid").write_text(str(os.getpid()))  # a living process
    (run_dir / ".mms.sock.9999").write_text("")
    server = Server(tmp_path, REPOSITORY / "model_store").wait_until_ready()
    assert requests.get(server.url("/models"), timeout=10).json() == {"models": []}
    assert not list(run_dir.glob("slots/*"))
    assert server.load("sowol").status_code == 200
    assert server.stop() == 0


def test_a_second_server_in_the_same_folder_is_refused(own_server: Server, tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--management-port", str(free_port()))
    second = run_entrypoint("serve", "--host", "127.0.0.1", *ports, RUN_DIR=str(tmp_path / "run"))
    assert second.returncode == 1
    assert "another server" in second.stderr


def test_ports_and_store_can_come_from_the_environment(tmp_path: Path) -> None:
    server = Server(tmp_path, environment={"MODEL_STORE": str(REPOSITORY / "model_store")})
    try:
        assert server.wait_until_ready().load("sowol").status_code == 200
    finally:
        server.stop()
