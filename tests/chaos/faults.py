"""Injects a plan's faults into a running server, and takes them back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from tests.chaos.history import Done
from tests.chaos.plan import Fault, Plan
from tests.chaos.store import Store
from tests.chaos.system import System

SLOW_CONNECTIONS = 1000
# Beside the used memory: hardly what a tiny model needs.
LEFT_BYTES = 4 << 20
AHEAD_S = (3600, -3600)  # of a clock that is set


class NotHere(Exception):
    """The fault is not possible on this machine."""


class Injector:
    """Injects faults; `done` are those until now."""

    def __init__(self, system: System, store: Store) -> None:
        self._system, self._store = system, store
        self.done: list[Done] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    def run(self, plan: Plan) -> None:
        """Returns when all faults are taken back, after the plan or `stop`."""
        began = time.monotonic()
        for fault in plan.faults:
            if self._stop.wait(max(began + fault.at_s - time.monotonic(), 0)):
                break
            thread = threading.Thread(target=self._inject, args=(fault,), name=fault.kind)
            thread.start()
            self._threads.append(thread)
        self._stop.wait(max(began + plan.seconds - time.monotonic(), 0))
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        self._stop.set()

    def _inject(self, fault: Fault) -> None:
        word, _, name = fault.kind.partition(" ")
        ways: dict[str, Callable[[contextlib.ExitStack, str, Fault], None]] = {
            "kill": self._kill,
            "stop": self._suspend,
            "store": self._break_store,
            "disk": self._fill_disk,
            "memory": self._take_memory,
            "slow": self._connect_slowly,
            "clock": self._set_clock,
        }
        began, skipped = time.monotonic(), ""
        with contextlib.ExitStack() as undo:
            try:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ways[word](undo, name, fault)
                if word != "kill":
                    self._stop.wait(fault.seconds)
            except NotHere as error:
                skipped = str(error)
        self.done.append(Done(fault.kind, began, time.monotonic(), skipped))

    def _process(self, name: str, fault: Fault) -> psutil.Process:
        found = self._system.processes(name)
        if not found:
            raise NotHere(f"no {name} at this time")
        return found[fault.pick % len(found)]

    def _kill(self, undo: contextlib.ExitStack, name: str, fault: Fault) -> None:
        self._process(name, fault).kill()

    def _suspend(self, undo: contextlib.ExitStack, name: str, fault: Fault) -> None:
        process = self._process(name, fault)
        process.suspend()
        undo.enter_context(contextlib.suppress(psutil.NoSuchProcess))
        undo.callback(process.resume)

    def _break_store(self, undo: contextlib.ExitStack, mode: str, fault: Fault) -> None:
        self._store.mode = mode
        undo.callback(self._mend_store, mode)

    def _mend_store(self, mode: str) -> None:
        if self._store.mode == mode:  # another fault's may have begun
            self._store.mode = ""

    def _fill_disk(self, undo: contextlib.ExitStack, name: str, fault: Fault) -> None:
        disks = self._system.disks
        if not disks.mounted:
            raise NotHere("mounts are not allowed")
        undo.callback(disks.empty, name)
        disks.fill(name)

    def _take_memory(self, undo: contextlib.ExitStack, name: str, fault: Fault) -> None:
        """Less memory for the whole server, or for the engine without control groups."""
        group = self._system.group
        engine = self._process("engine", fault)
        undo.enter_context(group.limited(LEFT_BYTES) if group else limited(engine, LEFT_BYTES))

    def _set_clock(self, undo: contextlib.ExitStack, name: str, fault: Fault) -> None:
        clock = self._system.clock
        if clock is None or not clock.environment:
            raise NotHere("no libfaketime that works here: requirements/test.txt has one")
        clock.set(AHEAD_S[fault.pick % len(AHEAD_S)])
        undo.callback(clock.set, 0)

    def _connect_slowly(self, undo: contextlib.ExitStack, name: str, fault: Fault) -> None:
        """Connections that send half a request's head, and no more."""
        for _ in range(SLOW_CONNECTIONS):
            with contextlib.suppress(OSError):  # the gateway may be away
                address = ("127.0.0.1", self._system.port)
                slow = undo.enter_context(socket.create_connection(address, timeout=5))
                slow.sendall(b"POST /predictions/a HTTP/1.1\r\nHost: localhost\r\nX-")


@contextlib.contextmanager
def limited(process: psutil.Process, left_bytes: int) -> Iterator[None]:
    """Limits a process's private memory to the present size and `left_bytes`."""
    try:
        _, hard = process.rlimit(psutil.RLIMIT_DATA)
        most = process.memory_info().data + left_bytes
        process.rlimit(psutil.RLIMIT_DATA, (most, hard))
    except psutil.Error as error:  # it has just ended, or is another user's
        raise NotHere(f"no limit of memory: {error}") from None
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_DATA, (hard, hard))  # another fault's may have begun
