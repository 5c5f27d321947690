"""Programs that a worker starts for its model, and what those start: all of it ends together.

Each program leads a session of its own. What it orphans comes to the worker (a subreaper), also
from other sessions, and is told from the worker's own children by its session: no process can go
back to one that it has left. What a dead worker leaves the server's entrypoint ends in that way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36
# What a killed process has to be gone within; memory of many gigabytes takes a while.
REAP_S = 10.0
# A program that forks faster than it is killed is not waited for any longer.
KILL_S = 2.0
LOOK_S = 0.002

_lock = threading.Lock()  # held while `_started` and the processes differ
_started: set[int] = set()  # the programs that have not been waited for


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int

    @property
    def lives(self) -> bool:
        return self.state not in "ZX"


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """A thread as old as the worker: the kernel ends a program with the thread that started it."""
    return ThreadPoolExecutor(1, thread_name_prefix="spawner")


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """A program in a session of its own, for `end`. Raises `OSError`, and `RuntimeError` where the
    thread that starts programs does not start itself."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def spawn() -> subprocess.Popen[bytes]:
        with _lock:
            process = subprocess.Popen(command, start_new_session=True, **options)
            _started.add(process.pid)
            return process

    try:
        return _spawner().submit(spawn).result()
    except RuntimeError:
        _spawner.cache_clear()  # `spawn` is in its queue, for the thread that it starts next
        raise


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills the program and what it has started, and waits until they are gone."""
    kill(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
    with _lock:
        _started.discard(process.pid)
    reap()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the program, unless it has been waited for, and what it has started.

    Orphans that left its session cannot be told from those of other programs of the same model:
    they go, too.
    """
    end = time.monotonic() + KILL_S
    while (victims := _family(process)) and time.monotonic() < end:
        for pid in victims:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def reap() -> None:
    """Waits for orphans that have ended."""
    with _lock:
        for orphan in _orphans(_processes()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, os.WNOHANG)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Leaves it as it is: until it is waited for, its number is that of its session, too."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _family(program: subprocess.Popen[bytes]) -> set[int]:
    """The program and all that it has started, of those that live."""
    processes = _processes()
    with _lock:
        others = _started - {program.pid}
    found = {p.pid for p in processes if program.pid in (p.pid, p.session)}
    found |= {p.pid for p in _orphans(processes) if p.session not in others} - others
    if program.returncode is not None:  # its number may be another process's by now
        found.discard(program.pid)
    while not (below := {p.pid for p in processes if p.parent in found}) <= found:
        found |= below
    return {p.pid for p in processes if p.lives and p.pid in found}


def _orphans(processes: list[_Process]) -> list[_Process]:
    """Children of this process that it has not started: they are in other sessions."""
    me, session = os.getpid(), os.getsid(0)
    return [
        p for p in processes if p.parent == me and p.session != session and p.pid not in _started
    ]


def _processes() -> list[_Process]:
    return list(_read_processes())


def _read_processes() -> Iterator[_Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                # The command's name may hold spaces and parentheses: what follows has none.
                fields = file.read().rpartition(b")")[2].split()
                yield _Process(int(entry), fields[0].decode(), int(fields[1]), int(fields[3]))
