"""A program's processes end with it, and those of other programs do not."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from handlers.user_code import descendants
from tests.e2e.server import eventually
from tests.processes import has_ended

# Prints the pids of a child, of a child in another session, and of two orphans, the second of which
# is in another session.
PROGRAM = """
import json, os, subprocess, time
sleep = ["sleep", "1000"]
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
for leave in (False, True):
    reader, writer = os.pipe()
    if os.fork() == 0:
        if leave:
            os.setsid()
        os.write(writer, str(subprocess.Popen(sleep, start_new_session=leave).pid).encode())
        os._exit(0)
    pids.append(int(os.read(reader, 20)))
    os.wait()
print(json.dumps(pids), flush=True)
time.sleep(1000)
"""

Programs = list[tuple[subprocess.Popen[bytes], list[int]]]


@pytest.fixture(autouse=True)
def _no_subreaper() -> Iterator[None]:
    """These tests' process adopts orphans no longer than they run."""
    yield
    ctypes.CDLL(None).prctl(descendants.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def programs() -> Iterator[Programs]:
    """Two of one worker, and what each has started."""
    started = []
    for _ in range(2):
        process = descendants.start([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            started.append((process, json.loads(process.stdout.readline())))
    yield started
    for process, _ in started:
        descendants.end(process)


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if not has_ended(pid)]


def test_all_processes_of_a_program_end_with_it(programs: Programs) -> None:
    (program, below), (other, others) = programs
    assert living(below) == below
    descendants.end(program)
    assert program.returncode == -9
    assert living([program.pid, *below]) == []
    # An orphan that left its session cannot be told from the first program's.
    assert living([other.pid, *others]) == [other.pid, *others[:3]]


def test_processes_of_a_program_that_ended_by_itself_end(programs: Programs) -> None:
    (program, below), _ = programs
    program.kill()
    eventually(lambda: descendants.has_ended(program))
    assert living(below) == below
    descendants.end(program)
    assert living(below) == []


def test_orphans_leave_no_zombies(programs: Programs) -> None:
    for process, below in programs:
        for pid in below[2:]:  # which the worker has adopted
            os.kill(pid, 9)
        eventually(lambda pids=below[2:]: not living(pids))
        descendants.reap()
        assert not [pid for pid in below[2:] if psutil.pid_exists(pid)]
        assert process.poll() is None


def test_a_workers_own_children_are_left_alone() -> None:
    with pytest.raises(FileNotFoundError):
        descendants.start(["/no/such/program"])
    own = subprocess.Popen(["sleep", "1000"])
    descendants.end(descendants.start(["sleep", "1000"]))
    descendants.reap()
    assert own.poll() is None
    own.kill()
    assert own.wait() == -9
