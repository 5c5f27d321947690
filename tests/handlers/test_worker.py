"""The processes of a worker end with it, and those of tensors are confined."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common import landlock
from handlers.user_code.confinement.rules import UIDS, may_change_user
from tests.e2e.server import REPOSITORY, eventually
from tests.handlers.messages import ask, load_message, request_message, worker_arguments
from tests.processes import WIDE_S, has_ended, nothing_starts_in

PROGRAM = """
import ctypes, sys
import handlers.worker as worker, handlers.mms_server as mms
from common import seccomp
from handlers.user_code.confinement.rules import PR_SET_NO_NEW_PRIVS
from tests.processes import become_a_user
import tests.handlers.confined_service  # which a confined one cannot read
mms.FIRST_CONNECTION_TIMEOUT_S = float(sys.argv.pop(1))
if user := int(sys.argv.pop(1)):
    become_a_user(user)
if forbidden := int(sys.argv.pop(1)):
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    assert seccomp.load(libc, seccomp.refuse([(forbidden, forbidden)]))
worker.main()
"""
A_USER = 54325


class Worker:
    """Started as Multi Model Server does."""

    def __init__(
        self, folder: Path, never_connected_s: float = 60, user: int = 0, forbidden: int = 0
    ) -> None:
        """forbidden: the number of a system call that fails in it"""
        self.socket = folder / ".mms.sock.9000"
        command = [sys.executable, "-c", PROGRAM, *map(str, (never_connected_s, user, forbidden))]
        command += worker_arguments(self.socket, "m", folder, "handlers.handler_service")
        self.process = subprocess.Popen(
            [*command, "--tmp-dir", str(folder)],
            cwd=REPOSITORY,
            env={**os.environ, "RUN_DIR": str(folder.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        assert self.output.readline() == f"[PID] {self.process.pid}\n"
        assert self.output.readline() == "MMS worker started.\n"

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.socket))
        return connection


Start = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Worker] = []

    def start(*given: Any, **more: Any) -> Worker:
        started.append(Worker(*given, **more))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.communicate()


def test_a_worker_without_connections_ends(tmp_path: Path, start: Start) -> None:
    worker = start(tmp_path, 0.5)
    assert worker.process.wait(60) == 0
    assert not worker.socket.exists()


def test_a_worker_with_an_open_connection_ends_with_its_watcher(
    tmp_path: Path, start: Start
) -> None:
    worker = start(tmp_path)
    with worker.connect() as connection:
        load = load_message("글", tmp_path, "handlers.handler_service")
        assert b"loaded model" in ask(connection, load)
        (child,) = worker.children()
        worker.process.kill()
        eventually(lambda: has_ended(child))


def test_a_process_that_does_not_start_is_tried_again(tmp_path: Path, start: Start) -> None:
    worker = start(tmp_path, user=A_USER)
    (child,) = eventually(worker.children)
    with nothing_starts_in(worker.process.pid):
        child.kill()
        assert any("does not start" in line for line in worker.output)
    eventually(worker.children)


@pytest.mark.parametrize("user", [0, A_USER])
@pytest.mark.parametrize("isolated", [True, False])
def test_a_worker_of_tensors_is_confined(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, user: int, isolated: bool
) -> None:
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    monkeypatch.setenv("SCRIPT_ISOLATION", str(isolated).lower())
    model = tmp_path / "그래프"
    model.mkdir()
    (tmp_path / "다른 모델").write_text("가중치", encoding="utf-8")
    (tmp_path / "weights").write_bytes(b"x")
    (model / "model.onnx").symlink_to(tmp_path / "weights")
    with start(model, user=user).connect() as connection:
        load = load_message("그래프", model, "tests.handlers.confined_service")
        assert b"loaded model" in ask(connection, load)
        answer = ask(connection, request_message(b"x"))
        found = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
    uid, groups = found.pop("user"), found.pop("groups")
    worked = {what for what, error in found.items() if error == ""}
    assert worked == ({"reads its model"} if isolated else set(found))
    if user == 0 and may_change_user() and isolated:
        assert uid in UIDS
        assert groups == []


@pytest.mark.skipif(not may_change_user(), reason="only root gives models users of their own")
def test_a_worker_of_tensors_without_a_free_user_answers_503(tmp_path: Path, start: Start) -> None:
    model = tmp_path / "그래프"
    model.mkdir()
    (model / "model.onnx").write_bytes(b"x")
    (tmp_path / "users").mkdir()
    (tmp_path / "used").touch()
    for uid in UIDS:
        (tmp_path / "users" / str(uid)).hardlink_to(tmp_path / "used")
    with (tmp_path / "used").open() as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        worker = start(model)
        with worker.connect() as connection:
            load = load_message("그래프", model, "handlers.handler_service")
            assert b"loaded model" in ask(connection, load)  # whatever the outcome, as in MMS
            answer = ask(connection, request_message("입력".encode()))
            assert b'"code":503' in answer.replace(b" ", b"")
            assert b"users for models' programs are in use" in answer
            assert len(worker.children()) == 1


def test_a_worker_of_tensors_that_cannot_be_confined_answers_with_the_reason(
    tmp_path: Path, start: Start
) -> None:
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    model = tmp_path / "그래프"
    model.mkdir()
    (model / "model.onnx").write_bytes(b"x")
    worker = start(model, forbidden=landlock.RESTRICT_SELF)
    (child,) = eventually(worker.children)
    with worker.connect() as connection:
        connection.settimeout(WIDE_S)
        assert b"loaded model" in ask(
            connection, load_message("그래프", model, "handlers.handler_service")
        )
        answer = ask(connection, request_message("입력".encode()))
        assert b"cannot be confined: Operation not permitted; allow Landlock" in answer
    assert worker.children() == [child]  # it was not started again


@pytest.mark.skipif(not may_change_user(), reason="only root gives models users of their own")
def test_a_worker_of_tensors_that_crashes_keeps_its_user(tmp_path: Path, start: Start) -> None:
    model = tmp_path / "그래프"
    model.mkdir()
    (model / "model.onnx").write_bytes(b"x")
    worker = start(model)

    def confined() -> psutil.Process | None:
        return next((p for p in worker.children() if p.uids().real in UIDS), None)

    first = eventually(confined)
    user = first.uids().real
    first.kill()
    eventually(lambda: has_ended(first))
    with (tmp_path / "users" / str(user)).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert eventually(confined).uids().real == user
