"""Starts, watches and stops the server's processes, and leaves none behind.

Each child leads a session of its own. This process adopts what its children orphan (as PID 1, or as
a subreaper), because MMS's launcher leaves its Java process, and that its workers, to the next one
up.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from serving.process.system import Processes

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
# A process that ran this long had worked, and is started again at once.
STEADY_S = 20.0
# One that runs and does not work for so long is killed, and then started again.
UNHEALTHY_S = 15.0

# A stop: DRAIN_S and this for the child that was started last; for all others together; for what
# is left after SIGKILL. Together 4 s less a reserve, for machines that are busy.
LAST_GRACE_S, GRACE_S, KILLED_S = 1.8, 1.2, 0.5


class Progress(enum.Enum):
    STARTING = enum.auto()
    LOADING = enum.auto()  # started; what is to be loaded first has a time limit of its own
    READY = enum.auto()


LOOK_S = {Progress.STARTING: 0.05, Progress.LOADING: 0.2, Progress.READY: 0.5}


@dataclass
class Child:
    """A process to keep running.

    One that ends with `gives_up` takes the server with it: it has said why it cannot start.
    `healthy` says at once whether it works. `listeners` it gets as open files, by the numbers they
    have here: who connects while it is started again waits for it.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    gives_up: int | None = None
    healthy: Callable[[], bool] | None = None
    listeners: Sequence[socket.socket] = ()
    pid: int | None = None
    started_at: float = 0.0
    worked_at: float | None = None  # None until it did, since its start
    restarts: int = 0
    restart_at: float | None = None

    def plan_restart(self, now: float) -> float:
        """Decides when to start again after an end; returns the delay in seconds."""
        if now - self.started_at > STEADY_S:
            self.restarts = 0
        delay = BACK_OFF_S[min(self.restarts, len(BACK_OFF_S) - 1)]
        self.restarts += 1
        self.pid, self.restart_at = None, now + delay
        return delay


@dataclass
class Supervisor:
    """Runs `children` until SIGTERM or SIGINT, or until one gives up, or when they have not started
    after `start_timeout_s`. A stop takes at most `drain_s` and 4 s."""

    children: list[Child]
    progress: Callable[[], Progress]  # answers at once
    on_ready: Callable[[], None]
    start_timeout_s: float
    drain_s: float
    processes: Processes = field(default_factory=Processes)
    on_restart: Callable[[str], None] = lambda name: None  # of a child that is to be started again

    def run(self) -> int:
        """Returns the exit status: 0 after a signal, otherwise 1 (and the log says why)."""
        for child in self.children:
            self._start(child)
        try:
            return self._watch()
        finally:
            self._stop()

    def _start(self, child: Child) -> None:
        files = [listener.fileno() for listener in child.listeners]
        child.pid = self.processes.start(child.command, child.environment, files)
        child.started_at = self.processes.now()
        child.restart_at = child.worked_at = None

    def _watch(self) -> int:
        processes = self.processes
        give_up_at = processes.now() + self.start_timeout_s
        progress = Progress.STARTING
        while processes.stop_signal is None:
            if self._one_gave_up():
                return 1
            processes.end_strays({child.pid for child in self.children if child.pid is not None})
            for child in self.children:
                if child.restart_at is not None and processes.now() >= child.restart_at:
                    self._start(child)
                self._kill_if_stuck(child)
            if progress is not Progress.READY:
                progress = self.progress()
                if progress is Progress.READY:
                    self.on_ready()
                elif progress is Progress.LOADING:
                    give_up_at = processes.now() + self.start_timeout_s
                elif processes.now() >= give_up_at:
                    logger.error("the server was not ready after %.0f s", self.start_timeout_s)
                    return 1
            processes.sleep(LOOK_S[progress])
        logger.info("stopping: %s", signal.Signals(processes.stop_signal).name)
        return 0

    def _one_gave_up(self) -> bool:
        """Looks at what has ended, and plans to start it again."""
        for pid, status in self.processes.ended():
            child = next((c for c in self.children if c.pid == pid), None)
            if child is None:
                continue
            how = describe_end(status)
            self.processes.signal_session(pid, signal.SIGKILL)  # what it had started
            if child.gives_up is not None and os.waitstatus_to_exitcode(status) == child.gives_up:
                logger.error("%s %s, so the server ends", child.name, how)
                return True
            delay_s = child.plan_restart(self.processes.now())
            self.on_restart(child.name)
            logger.error("%s %s; it is started again in %.1f s", child.name, how, delay_s)
        return False

    def _kill_if_stuck(self, child: Child) -> None:
        if child.healthy is None or child.pid is None:
            return
        now = self.processes.now()
        if child.healthy():
            child.worked_at = now
        first = child.worked_at is None
        limit_s = self.start_timeout_s if first else UNHEALTHY_S
        if now - (child.worked_at or child.started_at) >= limit_s:
            logger.error("%s has not worked for %.0f s and is killed", child.name, limit_s)
            self.processes.signal_session(child.pid, signal.SIGKILL)
            child.worked_at = now  # once; it is reaped like any other that ends

    def _stop(self) -> None:
        """The last child started stops first, then all others. TERM to their whole sessions, some
        time, KILL."""
        *others, last = self.children
        for listener in last.listeners:
            listener.close()  # once it has ended itself, nobody is to wait
        self._end([last], self.drain_s + LAST_GRACE_S)
        self._end(others, GRACE_S)
        end = self.processes.now() + KILLED_S
        while self.processes.kill_descendants() and self.processes.now() < end:
            self.processes.ended()
            self.processes.sleep(0.05)

    def _end(self, children: Sequence[Child], grace_s: float) -> None:
        processes = self.processes
        end = processes.now() + grace_s
        sessions = [child.pid for child in children if child.pid is not None]
        for session in sessions:
            processes.signal_session(session, signal.SIGTERM)
        while any(map(processes.session, sessions)) and processes.now() < end:
            processes.ended()
            processes.sleep(0.05)
        for session in sessions:
            processes.signal_session(session, signal.SIGKILL)
        for child in children:
            child.pid = None


def describe_end(status: int) -> str:
    """`was killed by SIGKILL` or `ended with status 3`, from a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
