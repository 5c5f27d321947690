"""Waiting for other processes, and what has become of one."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from handlers.user_code.confinement import capabilities
from testbed import process_tree

PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 4, 8
WIDE_S = 60.0
REPOSITORY = Path(__file__).resolve().parents[1]


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python in the repository to its end, with further options of `subprocess.run`."""
    fixed: dict[str, Any] = {"cwd": REPOSITORY, "capture_output": True, "text": True}
    command = [sys.executable, *arguments]
    return subprocess.run(command, timeout=120, check=False, **fixed, **options)


def clients_python() -> str:
    """The Python with requirements/clients.txt; skips the test without one."""
    found = os.environ.get("CLIENTS_PYTHON")
    if found is None or sys.version_info < (3, 11):
        pytest.skip("CLIENTS_PYTHON names a Python >= 3.11 with requirements/clients.txt")
    return str(Path(found).absolute())


def eventually(condition: Any, seconds: float = WIDE_S) -> Any:
    """Waits for a true value and returns it. `seconds` is a net, not what is tested."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s; the last value: {value!r:.500}"
        time.sleep(0.02)
    return value


def kill_at_once(pid: int) -> None:
    """Kills a process and all below it: suspended first, so that none reports another's end."""
    for end in (psutil.Process.suspend, psutil.Process.kill):
        for process in process_tree.processes(pid):
            with suppress(psutil.NoSuchProcess):
                end(process)


def has_ended(process: psutil.Process | int) -> bool:
    """Though nobody may have waited for it yet."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def zombies_below(pid: int) -> list[psutil.Process]:
    """Processes under this one that have ended and that nobody has waited for."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:  # somebody just has
            continue
    return found


# Shows the folder $1 although the folder $2 above it is closed to other users, to one program.
OPENED = """
set -e
mount --bind "$1" /mnt
mount -t tmpfs -o mode=755 none "$2"
mkdir -p "$1"
mount --bind /mnt "$1"
umount /mnt
shift 2
exec "$@"
"""


def readable_by_all(program: str) -> list[str]:
    """Return the beginning of a command line with which any user can run `program`.

    Without it a user could not reach root's Python in root's home.
    """
    above = reversed(Path(program).resolve().parents)
    closed = next((str(folder) for folder in above if not folder.stat().st_mode & stat.S_IXOTH), "")
    if not closed:
        return []
    unshare = ["unshare", "--mount", "--propagation", "private"]
    return [*unshare, "sh", "-c", OPENED, "sh", sys.base_prefix, closed]


def in_a_fork(function: Callable[[], Any]) -> Any:
    """Return, by JSON, the result of `function` in a process that may give up root."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # of threads: the fork makes system calls and no more
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            answer: dict[str, Any] = {"value": function()}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answered:
        answer = json.loads(answered.read())
    os.waitpid(pid, 0)
    assert "error" not in answer, answer["error"]
    return answer["value"]


def become_a_user(uid: int) -> None:
    """Gives up root, whom RLIMIT_NPROC does not hold for, but not the right to use root's files."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setresuid(uid, uid, uid)
        capabilities.drop_all_but({capabilities.DAC_OVERRIDE})
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that its files in /proc are its own


@contextmanager
def no_thread_starts() -> Iterator[threading.Event]:
    """Refuse new threads in this process; the event is set once one was refused."""
    refused = threading.Event()

    def refuse(*arguments: object) -> None:
        refused.set()
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "_start_new_thread", refuse)
        yield refused


@contextmanager
def no_files_in(pid: int) -> Iterator[None]:
    """Block in which the process gets no further descriptor.

    The limit is not 0: poll() of one descriptor would fail with EINVAL.
    """
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def nothing_starts_in(pid: int) -> Iterator[None]:
    """Neither a thread nor a process: its user has as many as it may have."""
    user = psutil.Process(pid).uids().real
    command = ["prlimit", f"--pid={pid}"]

    def limit(most: str) -> None:  # as that user: root may lack CAP_SYS_RESOURCE
        subprocess.run(
            [*command, f"--nproc={most}:"], check=True, user=user if os.geteuid() != user else None
        )

    before = resource.getrlimit(resource.RLIMIT_NPROC)[0]  # inherited
    limit("1")
    try:
        yield
    finally:
        limit(str(before) if before >= 0 else "unlimited")
