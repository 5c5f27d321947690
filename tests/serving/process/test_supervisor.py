"""Starting, watching and stopping processes that are none, in virtual time."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from serving.process.supervisor import Child, Progress, Supervisor

DRAIN_S = 25.0
KILLED = 9  # the wait status
OVERHEAD_S = 0.1  # what one look at a session may take


@dataclass
class Process:
    command: str
    started_at: float
    ends_at: float | None = None
    status: int = 0  # as `waitpid` gives it
    reaped: bool = False


class FakeProcesses:
    """A fake `system.Processes` and `signals.StopSignals`.

    `on_term` has the seconds after which a command ends.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.time = 0.0
        self.all: dict[int, Process] = {}
        self.on_term: dict[str, float | None] = {}
        self.refused: Counter[str] = Counter()  # next starts that fail, by command
        self.events: list[tuple[float, Callable[[], None]]] = []
        self.signals: list[tuple[str, int]] = []
        self._pids = itertools.count(100)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(seconds, 0)
        due = [event for event in self.events if event[0] <= self.time]
        self.events = [event for event in self.events if event[0] > self.time]
        for _, happen in due:
            happen()
        assert self.time < 10_000, "it never ends"

    def at(self, time: float, happen: Callable[[], None]) -> None:
        self.events.append((time, happen))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> int:
        if self.refused[command[0]]:
            self.refused[command[0]] -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        pid = next(self._pids)
        self.all[pid] = Process(command[0], self.time)
        return pid

    def ended(self) -> list[tuple[int, int]]:
        found = [(p, x) for p, x in self.all.items() if self._has_ended(x) and not x.reaped]
        for _, process in found:
            process.reaped = True
        return [(pid, process.status) for pid, process in found]

    def _has_ended(self, process: Process) -> bool:
        return process.ends_at is not None and process.ends_at <= self.time

    def session(self, id: int) -> list[int]:
        return [] if self._has_ended(self.all[id]) else [id]

    def signal_session(self, id: int, number: int) -> None:
        process = self.all[id]
        if self._has_ended(process):
            return
        self.signals.append((process.command, number))
        after_s = 0.0 if number == signal.SIGKILL else self.on_term.get(process.command, 0.2)
        if after_s is not None:
            process.ends_at = self.time + after_s
            process.status = KILLED if number == signal.SIGKILL else 0

    def end_strays(self, sessions: set[int]) -> None:
        assert sessions == {id for id in self.all if self.session(id)}

    def kill_descendants(self) -> bool:
        left = [id for id in self.all if self.session(id)]
        for id in left:
            self.signal_session(id, signal.SIGKILL)
        return bool(left)

    def end(self, command: str, status: int) -> None:
        """The newest of that name."""
        process = [p for p in self.all.values() if p.command == command][-1]
        process.ends_at, process.status = self.time, status << 8

    def starts(self, command: str) -> list[float]:
        return [process.started_at for process in self.all.values() if process.command == command]

    def count(self, command: str) -> int:
        return len(self.starts(command))

    def stop(self) -> None:
        self.received = signal.SIGTERM


class Server:
    def __init__(self, **engine: Any) -> None:
        self.processes = FakeProcesses()
        self.progress, self.readied = Progress.STARTING, 0
        self.restarted: list[str] = []
        self.processes.at(2, self._ready)
        self.children = [
            Child("the engine", ["engine"], {}, gives_up=2, **engine),
            Child("Multi Model Server", ["mms"], {}),
            Child("the gateway", ["gateway"], {}, gives_up=2),
        ]

    def _ready(self) -> None:
        self.progress = Progress.READY

    def _readied(self) -> None:
        self.readied += 1

    def run(self, until: float | None = None) -> int:
        processes: Any = self.processes
        if until is not None:
            processes.at(until, processes.stop)
        supervisor = Supervisor(
            self.children, lambda: self.progress, self._readied, 60.0, DRAIN_S, processes,
            processes, on_restart=self.restarted.append,
        )  # fmt: skip
        return supervisor.run()


def test_it_starts_all_says_once_that_it_is_ready_and_stops_the_last_first() -> None:
    server = Server()
    assert server.run(until=10) == 0
    assert server.readied == 1
    terms = [name for name, number in server.processes.signals if number == signal.SIGTERM]
    assert terms == ["gateway", "engine", "mms"]
    assert server.processes.time < 12


@pytest.mark.parametrize("command", ["engine", "gateway"])
def test_a_child_that_gives_up_ends_the_server_and_one_that_fails_does_not(command: str) -> None:
    server = Server()
    server.processes.at(5, lambda: server.processes.end(command, 1))
    server.processes.at(20, lambda: server.processes.end(command, 2))
    assert server.run() == 1
    assert server.processes.count(command) == 2
    assert 20 <= server.processes.time < 22


def test_a_child_that_ends_again_and_again_is_started_ever_later() -> None:
    server = Server()
    for second in range(3, 60):
        server.processes.at(second, lambda: server.processes.end("mms", 3))
    server.run(until=60)
    assert 7 <= server.processes.count("mms") <= 10


def test_a_child_that_had_worked_is_started_again_at_once_however_often_it_ends() -> None:
    server, ends = Server(), range(30, 280, 25)
    for second in ends:
        server.processes.at(second, lambda: server.processes.end("mms", 0))
    server.run(until=300)
    assert server.restarted == ["Multi Model Server"] * len(ends)
    started = server.processes.starts("mms")
    assert len(started) == 1 + len(ends)
    assert all(at < end + 1.5 for at, end in zip(started[1:], ends, strict=True))


def test_a_start_that_the_system_refuses_is_tried_again_ever_later() -> None:
    server = Server()
    processes = server.processes
    processes.refused["mms"] = 4
    processes.at(100, lambda: processes.refused.update(engine=3))
    processes.at(100, lambda: processes.end("engine", 1))
    assert server.run(until=150) == 0
    (mms,) = processes.starts("mms")
    assert 3.5 <= mms < 6  # 0, 0.5, 1 and 2 s after one another
    _, again = processes.starts("engine")
    assert 103.5 <= again < 106
    assert server.restarted == ["the engine"]


@pytest.mark.parametrize("refused", [0, 1_000_000])
def test_it_gives_up_and_stops_all_when_it_has_not_started_in_time(refused: int) -> None:
    server = Server()
    server.processes.events.clear()
    server.processes.refused["gateway"] = refused
    assert server.run() == 1
    assert 60 <= server.processes.time < 64
    assert server.processes.count("mms") == 1
    assert not any(map(server.processes.session, server.processes.all))


def test_what_is_loaded_first_takes_the_time_that_it_needs() -> None:
    server = Server()
    server.processes.events.clear()

    def loading() -> None:
        server.progress = Progress.LOADING

    server.processes.at(50, loading)
    server.processes.at(500, server._ready)
    assert server.run(until=501) == 0
    assert server.readied == 1


def test_an_engine_that_does_not_work_any_more_is_started_again() -> None:
    works = {"engine": True}
    server = Server(healthy=lambda since: works["engine"])
    processes = server.processes
    processes.at(100, lambda: works.update(engine=False))
    processes.at(108, lambda: works.update(engine=True))  # not for long: it is left alone
    processes.at(200, lambda: works.update(engine=False))
    processes.at(213, lambda: works.update(engine=processes.count("engine") > 1))
    processes.at(217, lambda: works.update(engine=processes.count("engine") > 1))
    processes.at(199, lambda: counts.append(processes.count("engine")))
    counts: list[int] = []
    server.run(until=300)
    assert counts == [1]
    _, again = processes.starts("engine")
    assert 215 <= again < 218


def test_an_engine_that_never_works_is_given_the_time_of_a_start() -> None:
    server = Server(healthy=lambda since: False)
    server.run(until=100)
    _, again = server.processes.starts("engine")
    assert 60 <= again < 63


def test_an_engine_that_is_started_again_is_given_the_time_of_a_start() -> None:
    """An answer of the engine before does not count as one of this."""
    server = Server(healthy=lambda since: since < 100)
    server.processes.at(100, lambda: server.processes.end("engine", 1))
    server.run(until=200)
    _, again, third = server.processes.starts("engine")
    assert 100 <= again < 102
    assert 60 <= third - again < 63


def test_a_signal_from_before_the_start_starts_nothing() -> None:
    server = Server()
    server.processes.stop()
    assert server.run() == 0
    assert server.processes.all == {}


@pytest.mark.parametrize("hung", [["gateway"], ["mms"], ["engine"], ["gateway", "mms", "engine"]])
def test_a_stop_is_bounded_whatever_hangs(hung: list[str]) -> None:
    server = Server()
    server.processes.on_term = dict.fromkeys(hung)
    assert server.run(until=50) == 0
    assert not any(map(server.processes.session, server.processes.all))
    assert server.processes.time <= 50.5 + DRAIN_S + 4 - 4 * OVERHEAD_S


def test_a_stop_does_not_wait_for_a_child_that_is_to_be_started_again() -> None:
    server = Server()
    server.processes.at(49.9, lambda: server.processes.end("gateway", 1))
    assert server.run(until=50) == 0
    assert server.processes.time < 53
