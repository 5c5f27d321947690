"""The server's processes: how they start, what ends that hangs, and what a model's own settings do.
How they die and come back: test_faults.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from tests.e2e.server import START_S, Server, eventually, free_port
from tests.e2e.stores import FAST, SHORT, bearer, packed, serving, small, statistics, text
from tests.processes import has_ended, kill_at_once, python

pytestmark = pytest.mark.slow


PORTS = {name: str(free_port()) for name in ("SAGEMAKER_BIND_TO_PORT", "MANAGEMENT_PORT")}


def run_entrypoint(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(
        "-m", "serving.entrypoint", *arguments, env={**os.environ, **PORTS, **environment}
    )


def test_another_command_is_run_as_it_is() -> None:
    done = run_entrypoint("bash", "-c", "echo 안녕; exit 7")
    assert (done.returncode, done.stdout) == (7, "안녕\n")
    assert run_entrypoint("no-such-command").returncode == 127


def test_what_stands_in_the_way_of_a_start_is_told_at_once(clean: Server) -> None:
    """Settings that are wrong by themselves: serving/test_settings.py."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, environment, said in (
            (["--management-port", port], {}, f"in use by process {os.getpid()} ("),
            ([], {"JAVA_HOME": "/nowhere"}, "Java"),
            ([], {"MODEL_STORE": "/nowhere"}, "MODEL_STORE"),  # by the gateway, in the log
            ([], {"RUN_DIR": str(clean.run_dir)}, "another server"),
        ):
            done = run_entrypoint("serve", "--host", "127.0.0.1", *options, **environment)
            assert done.returncode == 1
            assert said in done.stdout + done.stderr
            assert "Traceback" not in done.stdout + done.stderr
    assert clean.is_ready()


def test_pythons_own_variables_and_the_locale_change_nothing(tmp_path: Path) -> None:
    packed(small(tmp_path / "소월"), tmp_path / "store" / "소월.tar.gz")
    unusual = {"PYTHONOPTIMIZE": "2", "PYTHONUTF8": "0", "LC_ALL": "C", "ENGINE_BACKEND": "mxnet"}
    with serving(tmp_path / "server", tmp_path / "store", **unusual) as server:
        assert server.load("소월.tar.gz").status_code == 200
        assert text(server.predict("소월.tar.gz", SHORT))


def test_a_server_that_is_killed_and_the_next_whose_output_nobody_reads(tmp_path: Path) -> None:
    """The token for management alone leaves calls open, and no proxy is asked."""
    small(tmp_path / "store" / "봄")
    environment = {**FAST, "MANAGEMENT_TOKEN": "b"}
    environment |= dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    server = Server(tmp_path, tmp_path / "store", environment).wait_until_ready()
    run_dir = server.run_dir
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert "INFERENCE_TOKEN is not" in server.text()
    assert '"warning", "process": "gateway"' not in server.text()
    assert server.load("봄").status_code == 401
    loaded = server.post("/models?url=봄", management=True, headers=bearer("b"))
    assert loaded.status_code == 200
    kill_at_once(server.process.pid)
    server.process.wait()
    assert list(run_dir.glob("workers/*"))
    (run_dir / ".model_server.pid").write_text(str(os.getpid()))  # a living process
    (run_dir / ".mms.sock.9999").write_text("")

    # `serve | sleep 999`: requests, a restart, and a stop.
    server.log.unlink()
    os.mkfifo(server.log)
    output = os.open(server.log, os.O_RDONLY | os.O_NONBLOCK)
    server = Server(tmp_path, tmp_path / "store", environment)
    below: list[psutil.Process] = []
    try:
        eventually(server.is_ready, START_S)
        below = server.descendants()
        assert not list(run_dir.glob("workers/*"))  # what the first has left does not matter
        with requests.Session() as session:
            for _ in range(500):  # with the pipes, more than 1 MiB of lines
                url = server.url(f"/models/{'x' * 4000}")
                answer = session.get(url, headers=bearer("b"), timeout=30)
                assert answer.status_code in (400, 404)
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


def test_a_server_that_is_killed_alone_leaves_no_process(tmp_path: Path) -> None:
    small(tmp_path / "store" / "봄")
    script = tmp_path / "store" / "글" / "code" / "inference.py"
    script.parent.mkdir(parents=True)
    script.write_text("def model_fn(folder): return 1\ndef predict_fn(body, model): return body\n")
    for _ in range(2):  # in the same RUN_DIR, on new ports
        with Server(tmp_path, tmp_path / "store", FAST) as server:
            assert text(server.predict("봄", SHORT))
            assert server.predict("글", SHORT).status_code == 200
            below = server.descendants()
            assert len(below) > 6
            server.process.kill()
            server.process.wait()
            eventually(lambda below=below: all(map(has_ended, below)))


def test_nohup_keeps_a_server_from_ending_with_its_terminal(tmp_path: Path) -> None:
    with Server(tmp_path, tmp_path, FAST, prefix=["nohup"]) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.stop() == 0
        assert "stopping: SIGTERM" in server.text()


WAITS = """
import time
def model_fn(folder): return None
def transform_fn(model, body, content_type, accept):
    print("시작", flush=True)
    time.sleep(600)
"""


def test_what_outlasts_a_stop_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "store" / "글" / "code" / "inference.py"
    script.parent.mkdir(parents=True)
    script.write_text(WAITS, "utf-8")
    environment = {**FAST, "DRAIN_S": "0"}
    with Server(tmp_path, tmp_path / "store", environment) as server, ThreadPoolExecutor() as pool:
        call = pool.submit(server.predict, "글", SHORT)
        eventually(lambda: "시작" in server.text())
        assert server.stop() == 0
        answer = call.result()
        assert (answer.status_code, answer.json()["message"]) == (503, "the server is stopping")
        assert int(answer.headers["retry-after"]) > 0
        assert '"traceback"' not in server.text()


STOPS = 8  # of which one to four did not end


def test_a_stop_before_readiness_ends_in_pythons_development_mode(tmp_path: Path) -> None:
    environment = {**FAST, "PYTHONDEVMODE": "1", "PYTHONASYNCIODEBUG": "1"}
    for number in range(STOPS):
        (tmp_path / str(number)).mkdir()
        server = Server(tmp_path / str(number), tmp_path, environment)
        try:
            eventually(lambda server=server: server.descendants("serving.gateway"))
        finally:
            assert server.stop() == 0
        own = [line for line in server.text().splitlines() if '"process": "entrypoint"' in line]
        assert not [line for line in own if "ResourceWarning" in line]


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    for seed, name in enumerate(("a", "b", "봄")):
        small(clean.store / name, seed)
    (clean.store / "봄" / "serving.json").write_text(
        json.dumps({"precision": "int8", "max_rows": 2, "idle_unload_s": 3600, "timeout_s": 7})
    )
    return clean


def test_a_models_own_settings_come_from_its_file_and_its_request(server: Server) -> None:
    assert server.load("봄", pinned=True, timeout_s=9).status_code == 200
    assert server.get("/models/봄").json()["settings"] == {
        "pinned": True, "precision": "int8", "max_rows": 2, "timeout_s": 9, "idle_unload_s": 3600,
    }  # fmt: skip
    (held,) = statistics(server)["models"]
    assert (held["backend"], held["precision"]) == ("native", "int8")
    text(server.predict("봄", SHORT))
    server.unload("봄")
    query = "url=a&pinned=true&backend=mxnet&precision=fp32"
    assert server.post(f"/models?{query}", management=True).status_code == 200
    assert statistics(server)["models"][0]["backend"] == "mxnet"
    server.unload("a")


def test_processes_that_hang_are_started_again(server: Server) -> None:
    before = text(server.predict("a", SHORT))
    for program in "-m engine ", "-m handlers.host ", "ModelServer", "serving.gateway":
        server.descendants(program)[0].suspend()
    for name in "the engine", "the workers' host", "Multi Model Server", "the gateway":
        eventually(lambda name=name: f"{name} has not worked for 15 s" in server.text())
    eventually(lambda: server.is_ready() and server.predict("a", SHORT).status_code == 200)
    assert text(server.predict("a", SHORT)) == before
