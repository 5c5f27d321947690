"""Starts, watches and stops the server's processes, and leaves none behind.

Each child leads a session of its own. This process adopts what its children orphan (as PID 1, or as
a subreaper), because MMS's launcher leaves its Java process, and that its workers, to the next one
up.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
STOP_GRACE_S = 2.0
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
# A process that ran this long is started again at once.
STEADY_S = 60.0


class Progress(enum.Enum):
    STARTING = enum.auto()
    LOADING = enum.auto()  # started; what is to be loaded first has a time limit of its own
    READY = enum.auto()


LOOK_S = {Progress.STARTING: 0.05, Progress.LOADING: 0.2, Progress.READY: 0.5}


@dataclass
class Child:
    """A process to keep running.

    One that ends with `gives_up` takes the server with it: it has said why it cannot start.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    gives_up: int | None = None
    stop_grace_s: float = STOP_GRACE_S
    pid: int | None = None
    started_at: float = 0.0
    restarts: int = 0
    restart_at: float | None = None

    def start(self) -> None:
        # Not waited for by Popen but by the supervisor, which reaps everything.
        process = subprocess.Popen(
            list(self.command), env=dict(self.environment), start_new_session=True
        )
        self.pid, self.started_at, self.restart_at = process.pid, time.monotonic(), None
        process.returncode = 0

    def plan_restart(self) -> float:
        """Decides when to start again after an end; returns the delay in seconds."""
        if time.monotonic() - self.started_at > STEADY_S:
            self.restarts = 0
        delay = BACK_OFF_S[min(self.restarts, len(BACK_OFF_S) - 1)]
        self.restarts += 1
        self.pid, self.restart_at = None, time.monotonic() + delay
        return delay


@dataclass
class Supervisor:
    """Runs `children` until SIGTERM or SIGINT, or until one gives up, or when they have not started
    after `start_timeout_s`."""

    children: list[Child]
    progress: Callable[[], Progress]
    on_ready: Callable[[], None]
    start_timeout_s: float
    _stop_signal: int | None = None
    _wake: socket.socket = field(init=False)

    def run(self) -> int:
        """Returns the exit status: 0 after a signal, otherwise 1 (and the log says why)."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._catch_signals()
        for child in self.children:
            child.start()
        try:
            return self._watch()
        finally:
            self._stop()

    def _catch_signals(self) -> None:
        self._wake, writer = socket.socketpair()
        writer.setblocking(False)
        self._wake.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def stop(number: int, frame: Any) -> None:
            self._stop_signal = self._stop_signal or number

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _sleep(self, seconds: float) -> None:
        """Until a signal (an ended child sends one), or this time."""
        select.select([self._wake], [], [], max(seconds, 0))
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    def _watch(self) -> int:
        give_up_at = time.monotonic() + self.start_timeout_s
        progress = Progress.STARTING
        while self._stop_signal is None:
            for pid, status in _reap():
                child = next((c for c in self.children if c.pid == pid), None)
                if child is None:
                    continue
                how = describe_end(status)
                _kill_session(pid, signal.SIGKILL)  # what it had started
                if (
                    child.gives_up is not None
                    and os.waitstatus_to_exitcode(status) == child.gives_up
                ):
                    logger.error("%s %s, so the server ends", child.name, how)
                    return 1
                logger.error(
                    "%s %s; it is started again in %.1f s", child.name, how, child.plan_restart()
                )
            for child in self.children:
                if child.restart_at is not None and time.monotonic() >= child.restart_at:
                    child.start()
            if progress is not Progress.READY:
                progress = self.progress()
                if progress is Progress.READY:
                    self.on_ready()
                elif progress is Progress.LOADING:
                    give_up_at = time.monotonic() + self.start_timeout_s
                elif time.monotonic() >= give_up_at:
                    logger.error("the server was not ready after %.0f s", self.start_timeout_s)
                    return 1
            self._sleep(LOOK_S[progress])
        logger.info("stopping: %s", signal.Signals(self._stop_signal).name)
        return 0

    def _stop(self) -> None:
        """The last child started stops first. TERM to its whole session, some time, KILL."""
        for child in reversed(self.children):
            if child.pid is not None:
                _kill_session(child.pid, signal.SIGTERM)
                self._wait_for_session(child.pid, child.stop_grace_s)
                _kill_session(child.pid, signal.SIGKILL)
                child.pid = None
        for process in psutil.Process().children(recursive=True):  # whoever left its session
            with contextlib.suppress(psutil.Error):
                process.kill()
        end = time.monotonic() + STOP_GRACE_S
        while psutil.Process().children() and time.monotonic() < end:
            list(_reap())
            self._sleep(0.05)

    def _wait_for_session(self, session: int, grace_s: float) -> None:
        end = time.monotonic() + grace_s
        while session_members(session) and time.monotonic() < end:
            list(_reap())
            self._sleep(0.05)


def _reap() -> list[tuple[int, int]]:
    """Every child that has ended, adopted ones too, with its wait status."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _kill_session(session: int, number: int) -> None:
    for pid in session_members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def describe_end(status: int) -> str:
    """`was killed by SIGKILL` or `ended with status 3`, from a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
