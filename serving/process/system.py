"""The supervisor's access to the operating system: processes, sessions, signals, time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from common.oom import SERVER, oom_score_adj

PR_SET_CHILD_SUBREAPER = 36
# Time limit for the end of a killed session. Longer: a process that hangs in the kernel delays the
# restart of others. Shorter: on a busy machine, a restart may begin beside the old processes.
KILLED_S = 2.0

T = TypeVar("T")


class Processes:
    """Starts, reaps and kills processes; makes this process a subreaper, which adopts orphans."""

    def __init__(self) -> None:
        self.stop_signal: int | None = None  # the first received of SIGTERM, SIGINT and SIGHUP
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._wake, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

        def stop(number: int, frame: Any) -> None:
            self.stop_signal = self.stop_signal or number

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a signal, such as that of an exited child."""
        select.select([self._wake], [], [], max(seconds, 0))
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    @staticmethod
    def start(command: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> int:
        """Starts a process with these open `files`; returns its pid and session id."""
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
        """Returns the pids of the running processes of a session."""
        pids = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == id and process.status() != psutil.STATUS_ZOMBIE:
                    pids.append(process.pid)
        return pids

    def signal_session(self, id: int, number: int) -> None:
        """Signals a session's processes; repeats SIGKILL until there are none: they may fork."""
        end = time.monotonic() + KILLED_S
        while pids := self.session(id):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number != signal.SIGKILL or time.monotonic() >= end:
                return
            time.sleep(0.01)

    @staticmethod
    def end_strays(sessions: Set[int]) -> None:
        """Kills adopted processes outside of `sessions`, which models' scripts have started.

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
        """Kills all descendants, of any session; returns whether there were any."""
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return bool(below)


class Poll(Generic[T]):
    """Calls `poll` repeatedly on a thread of its own; calling this returns its latest result.

    `pause_s` maps a result to the seconds until the next call, None for no more calls.
    """

    def __init__(
        self, poll: Callable[[], T], first: T, pause_s: Callable[[T], float | None]
    ) -> None:
        self._poll, self._latest, self._pause_s = poll, first, pause_s
        threading.Thread(target=self._run, name="poll", daemon=True).start()

    def __call__(self) -> T:
        return self._latest

    def _run(self) -> None:
        while True:
            self._latest = self._poll()
            pause_s = self._pause_s(self._latest)
            if pause_s is None:
                return
            time.sleep(pause_s)
