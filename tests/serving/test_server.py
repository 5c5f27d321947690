"""What the entrypoint does before it starts the server's processes, and signals meanwhile."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import server
from serving.errors import StartError
from serving.process.signals import StopSignals
from serving.server import MAX_SOCKET_PATH, _run_dir
from serving.settings import Settings
from testbed.process import free_port
from tests.processes import REPOSITORY, eventually, in_a_fork, python


def test_a_start_that_fails_for_a_long_tmpdir_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("가" * (MAX_SOCKET_PATH // 3))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(StartError, match="too long for a unix socket"), _run_dir(Settings()):
        pass
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("place", ["파일", "파일/run"])
def test_a_run_dir_that_is_no_folder_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "파일").write_text("")
    settings = Settings(run_dir=str(tmp_path / place))
    with pytest.raises(StartError, match=f"RUN_DIR .*{place} cannot be used"), _run_dir(settings):
        pass


def test_a_second_server_in_a_run_dir_names_the_first(tmp_path: Path) -> None:
    settings = Settings(run_dir=str(tmp_path / "실행"))
    with _run_dir(settings):
        for _ in range(2):
            refused = pytest.raises(StartError, match=f"process {os.getpid()}, runs in RUN_DIR")
            with refused, _run_dir(settings):
                pass
    with _run_dir(settings):
        pass


def test_too_few_open_files_end_the_start() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    command = [sys.executable, "-m", "serving.entrypoint", "serve"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "only 128 files (ulimit -n), must be at least 1024" in done.stderr


def test_a_folder_without_room_for_temporary_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "없음"))
    refused = pytest.raises(StartError, match="TMPDIR cannot be used: No such file")
    with refused, _run_dir(Settings()):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user cannot read")
def test_a_model_folder_that_is_closed_to_the_servers_user_ends_the_start(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SageMaker's local mode mounts it, for an image that starts as another user."""
    (open_folder / "model").mkdir(0o700)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(open_folder))

    def start() -> tuple[int, str]:
        os.setresuid(10001, 10001, 10001)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            return server.main([], StopSignals()), errors.getvalue()

    status, message = in_a_fork(start)
    assert status == 1
    assert f"user 10001 cannot read {open_folder}/model: " in message
    assert "kogpt2 push" in message
    (open_folder / "model").chmod(0o755)
    weights = open_folder / "model" / "시.params"
    weights.touch(0o600)
    status, message = in_a_fork(start)
    assert status == 1
    assert f"user 10001 cannot read {weights}: " in message


def test_signals_are_handled_before_anything_large_is_imported() -> None:
    """PID 1 loses a signal that comes before."""
    ours = (
        "[m for m in sys.modules if m.split('.')[0] in ('common', 'engine', 'serving', 'psutil')]"
    )
    done = python("-c", f"import sys, serving.entrypoint; print(*sorted({ours}))")
    named = ["serving", "serving.entrypoint", "serving.process", "serving.process.signals"]
    assert done.stdout.split() == named


def entrypoint(path: Path, name: str) -> list[str]:
    """A Dockerfile's entrypoint, run from the repository."""
    [line] = re.findall(r"^ENTRYPOINT (.*)$", path.read_text(), re.MULTILINE)
    *before, program = json.loads(line)
    assert program == "dockerd-entrypoint.py"
    return [*before, sys.executable, "-m", "serving.entrypoint", name]


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("Dockerfile.[cg]pu")), ids=lambda p: p.name)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_interpreter_runs_ends_the_start(
    temporary: Path, path: Path, number: int
) -> None:
    """It is sent before the image's program is executed, and waits for its handler."""
    sent = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [int(sys.argv[1])]);"
        " os.kill(os.getpid(), int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", sent, str(int(number)), *entrypoint(path, "serve")],
        cwd=REPOSITORY,
        env={
            "PATH": os.environ["PATH"], "TMPDIR": str(temporary),
            "SAGEMAKER_BIND_TO_PORT": str(free_port()), "MANAGEMENT_PORT": str(free_port()),
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"stopping: {signal.Signals(number).name}" in done.stdout + done.stderr
    assert list(temporary.iterdir()) == []


def test_another_command_has_no_signal_blocked() -> None:
    command = [
        *entrypoint(REPOSITORY / "Dockerfile.cpu", "sh"),
        "-c",
        "grep SigBlk /proc/self/status",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[1], 16) == 0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets in it."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_checks_ends_the_start(
    tmp_path: Path, temporary: Path, number: int
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n: > {tmp_path}/checked\nexec sleep 600\n")
    java.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "serving.entrypoint", "serve", "--host", "127.0.0.1"],
        cwd=REPOSITORY,
        env={
            "PATH": os.environ["PATH"], "JAVA_HOME": str(tmp_path),
            "TMPDIR": str(temporary), "SAGEMAKER_BIND_TO_PORT": str(free_port()),
            "MANAGEMENT_PORT": str(free_port()),
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with process:
        eventually((tmp_path / "checked").exists)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert f"stopping: {signal.Signals(number).name}" in said
    assert list(temporary.iterdir()) == []
