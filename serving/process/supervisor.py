"""Starts, watches, restarts and stops the server's processes.

Each child leads a session of its own. This process adopts orphaned grandchildren, as PID 1 or as a
subreaper, and stops them, too: MMS's launcher orphans its Java process, and Java its workers.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from serving.process.signals import StopSignals
from serving.process.system import Processes

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # before the 1st, 2nd, ... restart in a row
STEADY_S = 20.0  # a process that ran this long is restarted without back-off
# A process whose health checks fail for this long is killed and restarted. Longer: a hung process
# is noticed later. Shorter: on a busy machine, processes that work are killed.
UNHEALTHY_S = 15.0

# Time limits of a stop: for the child that was started last, after DRAIN_S; for all others; for
# processes that outlive SIGKILL. Together 3.5 s of the 4 s that `Supervisor` promises.
LAST_GRACE_S, GRACE_S, KILLED_S = 1.8, 1.2, 0.5


class Progress(enum.Enum):
    STARTING = enum.auto()
    LOADING = enum.auto()  # preloading models, which has its own time limit
    READY = enum.auto()


POLL_S = {Progress.STARTING: 0.05, Progress.LOADING: 0.2, Progress.READY: 0.5}


@dataclass
class Child:
    """A process that is restarted whenever it exits.

    The server ends when the child exits with the status `gives_up`, having logged why it cannot
    start. `healthy` returns whether a check that began after a time of the monotonic clock has
    succeeded, and must not block. `listeners` are inherited by the child under the same file
    descriptors, so connections wait while it is restarted.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    gives_up: int | None = None
    healthy: Callable[[float], bool] | None = None
    listeners: Sequence[socket.socket] = ()
    pid: int | None = None
    started_at: float = 0.0
    worked_at: float | None = None  # time of the last successful health check since the start
    restarts: int = 0
    restart_at: float | None = None

    def plan_restart(self, now: float) -> float:
        """Set `restart_at` after an exit; return the back-off in seconds."""
        if now - self.started_at > STEADY_S:
            self.restarts = 0
        delay = BACK_OFF_S[min(self.restarts, len(BACK_OFF_S) - 1)]
        self.restarts += 1
        self.pid, self.restart_at = None, now + delay
        return delay


@dataclass
class Supervisor:
    """Runs `children` until a signal, or until they cannot be started.

    Stops all of them on SIGTERM, SIGINT or SIGHUP, when a child exits with its `gives_up`, and when
    the server has not started within `start_timeout_s`. A stop takes at most `drain_s` plus 4 s.
    """

    children: list[Child]
    progress: Callable[[], Progress]  # must not block
    on_ready: Callable[[], None]
    start_timeout_s: float
    drain_s: float
    signals: StopSignals
    processes: Processes = field(default_factory=Processes)
    on_restart: Callable[[str], None] = lambda name: None  # gets the name of the child

    def run(self) -> int:
        """Run the children. Returns the exit status: 0 after a signal, otherwise 1, with a log."""
        try:
            for child in self.children:
                if self.signals.received is None:
                    self._start(child)
            return self._watch()
        finally:
            self._stop()

    def _start(self, child: Child) -> None:
        """Start a child, or plan another attempt if there are too few processes or memory."""
        files = [listener.fileno() for listener in child.listeners]
        child.started_at = self.processes.now()
        child.restart_at = child.worked_at = None
        try:
            child.pid = self.processes.start(child.command, child.environment, files)
        except OSError as error:
            delay_s = child.plan_restart(child.started_at)
            logger.error(
                "%s cannot be started: %s; it is tried again in %.1f s",
                child.name, error.strerror, delay_s,
            )  # fmt: skip

    def _watch(self) -> int:
        processes = self.processes
        give_up_at = processes.now() + self.start_timeout_s
        progress = Progress.STARTING
        while self.signals.received is None:
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
                    logger.error(
                        "the server was not ready after %.0f s (START_TIMEOUT_S)",
                        self.start_timeout_s,
                    )
                    return 1
            self.signals.sleep(POLL_S[progress])
        logger.info("stopping: %s", signal.Signals(self.signals.received).name)
        return 0

    def _one_gave_up(self) -> bool:
        """Reaps exited processes and plans restarts; returns true if a child gave up."""
        for pid, status in self.processes.ended():
            child = next((c for c in self.children if c.pid == pid), None)
            if child is None:
                continue
            how = describe_end(status)
            self.processes.signal_session(pid, signal.SIGKILL)  # its own children
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
        if child.healthy(child.started_at):
            child.worked_at = now
        first = child.worked_at is None
        limit_s = self.start_timeout_s if first else UNHEALTHY_S
        if now - (child.worked_at or child.started_at) >= limit_s:
            logger.error("%s has not worked for %.0f s and is killed", child.name, limit_s)
            self.processes.signal_session(child.pid, signal.SIGKILL)
            child.worked_at = now  # not killed twice before it is reaped

    def _stop(self) -> None:
        """Stop the last child, then all others, each with SIGTERM, a grace period and SIGKILL."""
        *others, last = self.children
        for listener in last.listeners:
            listener.close()  # once the child closes it, too, new connections are refused
        self._end([last], self.drain_s + LAST_GRACE_S)
        self._end(others, GRACE_S)
        end = self.processes.now() + KILLED_S
        while self.processes.kill_descendants() and self.processes.now() < end:
            self.processes.ended()
            self.signals.sleep(0.05)

    def _end(self, children: Sequence[Child], grace_s: float) -> None:
        processes = self.processes
        end = processes.now() + grace_s
        sessions = [child.pid for child in children if child.pid is not None]
        for session in sessions:
            processes.signal_session(session, signal.SIGTERM)
        while any(map(processes.session, sessions)) and processes.now() < end:
            processes.ended()
            self.signals.sleep(0.05)
        for session in sessions:
            processes.signal_session(session, signal.SIGKILL)
        for child in children:
            child.pid = None


def describe_end(status: int) -> str:
    """Describe a wait status, such as `was killed by SIGKILL` or `ended with status 3`."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
