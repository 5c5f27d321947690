"""The server's processes: how they start. How they die and come back: test_faults.py."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import requests

from tests.e2e.server import REPOSITORY, START_S, Server, eventually, free_port
from tests.e2e.stores import FAST, SHORT, serving, small, text
from tests.processes import has_ended

pytestmark = pytest.mark.slow


PORTS = {name: str(free_port()) for name in ("SAGEMAKER_BIND_TO_PORT", "MANAGEMENT_PORT")}


def run_entrypoint(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serving.entrypoint", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **PORTS, **environment},
        capture_output=True,
        text=True,
        timeout=120,
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
    assert variable in done.stdout + done.stderr  # of the gateway, in the log
    assert "Traceback" not in done.stdout + done.stderr


def test_the_token_for_management_alone_leaves_calls_open_and_proxies_are_not_asked(
    tmp_path: Path,
) -> None:
    """Which the log says. The token for calls alone: serving/test_settings.py."""
    small(tmp_path / "store" / "봄")
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    with serving(tmp_path, tmp_path / "store", **proxies, MANAGEMENT_TOKEN="b") as server:  # noqa: S106
        token = {"Authorization": "Bearer b"}
        assert server.load("봄").status_code == server.unload("봄").status_code == 401
        url = server.management("/models?url=봄")
        assert requests.post(url, headers=token, timeout=60).status_code == 200
        assert text(server.predict("봄", SHORT))
        assert "INFERENCE_TOKEN is not" in server.text()


def test_what_a_killed_server_left_does_not_matter_to_the_next(tmp_path: Path) -> None:
    small(tmp_path / "store" / "a")
    server = Server(tmp_path, tmp_path / "store", FAST).wait_until_ready()
    assert server.run_dir.stat().st_mode & 0o777 == 0o700
    server.load("a")
    below = server.descendants()
    for process in [psutil.Process(server.process.pid), *below]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
    run_dir = server.run_dir
    assert list(run_dir.glob("workers/*"))
    (run_dir / ".model_server.pid").write_text(str(os.getpid()))  # a living process
    (run_dir / ".mms.sock.9999").write_text("")
    with serving(tmp_path, tmp_path / "store") as server:
        assert server.get("/models").json() == {"models": []}
        assert not list(run_dir.glob("workers/*"))
        assert server.load("a").status_code == 200
        assert server.stop() == 0


def test_a_second_server_in_the_same_folder_is_refused(clean: Server) -> None:
    second = run_entrypoint("serve", "--host", "127.0.0.1", RUN_DIR=str(clean.run_dir))
    assert second.returncode == 1
    assert "another server" in second.stderr
    assert clean.is_ready()


def test_an_output_that_is_not_read_holds_up_no_process(tmp_path: Path) -> None:
    """`serve | sleep 999`: requests, a restart, and a stop."""
    small(tmp_path / "store" / "봄")
    (tmp_path / "server.log").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "server.log")
    output = os.open(tmp_path / "server.log", os.O_RDONLY | os.O_NONBLOCK)
    server = Server(tmp_path, tmp_path / "store", FAST)
    below: list[psutil.Process] = []
    try:
        eventually(server.is_ready, START_S)
        below = server.descendants()
        with requests.Session() as session:
            for _ in range(500):  # with the pipes, more than 1 MiB of lines
                path = f"/models/{'x' * 4000}"
                assert session.get(server.url(path), timeout=30).status_code in (400, 404)
        (gateway,) = server.descendants("serving.gateway")
        gateway.kill()
        eventually(lambda: has_ended(gateway))
        eventually(server.is_ready)
        assert text(server.predict("봄", SHORT))
        assert server.stop() == 0  # within STOP_S
    finally:
        server.process.kill()
        server.process.wait()
        for process in below:  # where it did not end them
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.close(output)
