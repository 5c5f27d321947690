"""What the supervisor asks of the operating system: processes, their sessions, signals, time."""

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
# What a killed session may take to end. Long on a machine that is busy; one whose process hangs in
# the kernel holds up the others no longer.
KILLED_S = 2.0

T = TypeVar("T")


class Processes:
    """Its owner adopts what its children orphan, as PID 1 or as a subreaper, and reaps it."""

    def __init__(self) -> None:
        self.stop_signal: int | None = None  # the first that was received of those that mean it
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
        """Until a signal (an ended child sends one), or this time."""
        select.select([self._wake], [], [], max(seconds, 0))
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    @staticmethod
    def start(command: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> int:
        """In a session of its own, with these open `files`; returns its pid, which is the session's
        id, too."""
        process = subprocess.Popen(
            list(command), env=dict(environment), start_new_session=True, pass_fds=files
        )
        process.returncode = 0  # not waited for by Popen: `ended` reaps everything
        return process.pid

    @staticmethod
    def ended() -> list[tuple[int, int]]:
        """Every child that has ended, adopted ones too, with its wait status."""
        found: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            found.append((pid, status))

    @staticmethod
    def session(id: int) -> list[int]:
        """Processes of a session that have not ended."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == id and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def signal_session(self, id: int, number: int) -> None:
        """SIGKILL until none is left: one may have been forked since they were listed."""
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
        """Kills what has come to this process from a session that is none of these: a model's
        script began it, and the worker that would have ended it is gone. What an operator has left
        running in the container is not as expendable."""
        for children in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # of a thread, or a process, that has ended
                for pid in map(int, children.read_text().split()):
                    if os.getsid(pid) not in sessions and oom_score_adj(pid) > SERVER:
                        os.kill(pid, signal.SIGKILL)

    @staticmethod
    def kill_descendants() -> bool:
        """Whoever has left its session, too. Says whether there were any."""
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return bool(below)


class Poll(Generic[T]):
    """Asks again and again on a thread of its own; a call gives the latest answer at once.

    `pause_s` says how long to wait after an answer, None for never to ask again.
    """

    def __init__(
        self, ask: Callable[[], T], first: T, pause_s: Callable[[T], float | None]
    ) -> None:
        self._ask, self._latest, self._pause_s = ask, first, pause_s
        threading.Thread(target=self._run, name="poll", daemon=True).start()

    def __call__(self) -> T:
        return self._latest

    def _run(self) -> None:
        while True:
            self._latest = self._ask()
            pause_s = self._pause_s(self._latest)
            if pause_s is None:
                return
            time.sleep(pause_s)
