"""The supervisor's access to the operating system: processes, sessions, signals, time."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from common.oom import SERVER, oom_score_adj

PR_SET_CHILD_SUBREAPER = 36
# Time limit for the end of a killed session. Longer: a process that hangs in the kernel delays the
# restart of others. Shorter: on a busy machine, a restart may begin beside the old processes.
KILLED_S = 2.0
# Time limit for the end of a poll's thread, whose connection ends with the process that it checks.
CLOSE_S = 0.1

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Processes:
    """Starts, reaps and kills processes; makes this process a subreaper, which adopts orphans."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @staticmethod
    def now() -> float:
        return time.monotonic()

    @staticmethod
    def start(command: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> int:
        """Start a process with these open `files`; return its pid and session id."""
        process = subprocess.Popen(
            list(command), env=dict(environment), start_new_session=True, pass_fds=files
        )
        process.returncode = 0  # not waited for by Popen: `ended` reaps everything
        return process.pid

    @staticmethod
    def ended() -> list[tuple[int, int]]:
        """Reaps all exited children, also adopted ones; returns their pids and wait statuses."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended.append((pid, status))

    @staticmethod
    def session(id: int) -> list[int]:
        """Return the pids of the running processes of a session."""
        pids = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == id and process.status() != psutil.STATUS_ZOMBIE:
                    pids.append(process.pid)
        return pids

    @staticmethod
    def signal_session(id: int, number: int) -> None:
        """Signal a session's processes, this one excepted.

        Repeats SIGKILL until there are none: they may fork.
        """
        end = time.monotonic() + KILLED_S
        while pids := [pid for pid in Processes.session(id) if pid != os.getpid()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number != signal.SIGKILL or time.monotonic() >= end:
                return
            time.sleep(0.01)

    @staticmethod
    def end_strays(sessions: Set[int]) -> None:
        """Kill adopted processes outside of `sessions`, which models' scripts have started.

        The worker that would have ended them has exited. Processes that an operator has started in
        the container are not killed: they have a lower OOM score.
        """
        for children in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread or process has ended
                for pid in map(int, children.read_text().split()):
                    if os.getsid(pid) not in sessions and oom_score_adj(pid) > SERVER:
                        os.kill(pid, signal.SIGKILL)

    @staticmethod
    def kill_descendants() -> bool:
        """Kill all descendants, of any session; return whether there were any."""
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return bool(below)


class Poll(Generic[T]):
    """Calls `poll` repeatedly on a thread of its own; calling this returns the latest result.

    `pause_s` maps a result to the seconds until the next call, None for no more calls. A call that
    raises counts as one that returned `first`.
    """

    def __init__(
        self, poll: Callable[[], T], first: T, pause_s: Callable[[T], float | None]
    ) -> None:
        self._poll, self._first, self._pause_s = poll, first, pause_s
        self._latest = (-math.inf, first)  # when the call began, and its result
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)
        self._thread.start()

    def __call__(self, since: float = -math.inf) -> T:
        """Return the latest result; `first` if its call began before the monotonic time `since`.

        So a process that was restarted is not judged by an answer of the one before it.
        """
        began, result = self._latest
        return result if began >= since else self._first

    def close(self) -> None:
        """End the thread, after the call in progress. Waits for it for at most CLOSE_S."""
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                result = self._poll()
            except Exception as error:  # such as ENFILE: this thread has to outlive it
                logger.warning("a check failed: %r", error)
                result = self._first
            self._latest = began, result
            pause_s = self._pause_s(result)
            if pause_s is None:
                return
            self._closed.wait(pause_s)
