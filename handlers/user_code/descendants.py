"""Starts a model's programs, and kills them together with all processes that they have started.

Each program leads a session of its own. The worker is a subreaper: a program's orphans, also those
in other sessions, become the worker's children. Their session distinguishes them from the worker's
own children, since no process can rejoin a session that it has left. The server's entrypoint kills
the orphans of a dead worker the same way.
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36
# How long to wait for a killed process to end: freeing many gigabytes of memory takes seconds.
REAP_TIMEOUT_S = 10.0
# How long to keep killing a program that forks faster than it is killed.
KILL_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.002

_lock = threading.Lock()  # held from a program's start until it is in `_started`
_started: set[int] = set()  # pids of the programs that have not been waited for


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """Return the thread that starts all programs: PR_SET_PDEATHSIG ends them with their thread."""
    return ThreadPoolExecutor(1, thread_name_prefix="spawner")


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a new session; stop it with `end`. Raises `OSError`, `RuntimeError`."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def spawn() -> subprocess.Popen[bytes]:
        with _lock:
            process = subprocess.Popen(command, start_new_session=True, **options)
            _started.add(process.pid)
            return process

    try:
        return _spawner().submit(spawn).result()
    except RuntimeError:
        _spawner.cache_clear()  # else its next thread would still run `spawn`
        raise


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and the processes that it has started, and wait for them to end."""
    kill(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_TIMEOUT_S)
    with _lock:
        _started.discard(process.pid)
    reap()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program, unless it has been waited for, and the processes that it has started.

    Also kills orphans that left the sessions of other programs of the same model: they cannot be
    distinguished from this program's.
    """
    end = time.monotonic() + KILL_TIMEOUT_S
    while (victims := _family(process)) and time.monotonic() < end:
        for pid in victims:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)


def reap() -> None:
    """Remove the zombies of orphans that have ended."""
    with _lock:
        for orphan in _orphans(_processes()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, os.WNOHANG)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the program has ended. Does not reap its zombie, which reserves the pid."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _family(program: subprocess.Popen[bytes]) -> set[int]:
    """List the processes that still run of the program and all that it has started."""
    processes = _processes()
    with _lock:
        others = _started - {program.pid}
    family = {p.pid for p in processes if program.pid in (p.pid, p.session)}
    family |= {p.pid for p in _orphans(processes) if p.session not in others} - others
    if program.returncode is not None:  # its pid may have been reused
        family.discard(program.pid)
    while not (below := {p.pid for p in processes if p.parent in family}) <= family:
        family |= below
    return {p.pid for p in processes if p.state not in "ZX" and p.pid in family}


def _orphans(processes: list[_Process]) -> list[_Process]:
    """List children of this process, in other sessions, that it has not started."""
    pid, session = os.getpid(), os.getsid(0)
    return [
        p for p in processes if p.parent == pid and p.session != session and p.pid not in _started
    ]


def _processes() -> list[_Process]:
    processes = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                # Only the command's name may contain spaces and parentheses.
                fields = file.read().rpartition(b")")[2].split()
                state, parent, session = fields[0].decode(), int(fields[1]), int(fields[3])
                processes.append(_Process(int(entry), state, parent, session))
    return processes
