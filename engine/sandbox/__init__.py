"""Sandboxes: child processes with limits, in which our code reads untrusted files.

A file that crashes a parser, never ends or takes all memory costs one child process and one error,
not the engine and all models in it. Children are forked from a helper that has imported what they
need (`engine.sandbox.zygote`), so a child costs some 10 ms and little memory of its own. Their
answers are JSON: the engine unpickles, maps and runs nothing that comes from a child.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ArtifactError, EngineError, EngineUnavailable, Overloaded, named
from common.memory import MIB
from engine.sandbox.messages import receive, send

ROOT = Path(__file__).parents[2]
HELPER_S = 30.0  # a wide limit for the helper to fork a child
STATUS_S = 5.0  # a wide limit for the helper to send a child's exit status
ENDED = "its reader has ended"
UNREADABLE = "could not be read: "  # in messages of errors, after what was read
Target = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of a child."""

    memory_mib: int = 512  # private memory beyond that at the fork; mapped files do not count
    cpu_s: int = 0  # in its whole life; 0: no limit, for children whose calls have timeouts
    answer_mib: int = 16  # the longest answer
    niceness: int = 0  # as of `os.nice`
    # Whether it forks sandboxes from what its target has prepared, which must not handle what
    # a client sends: it has no memory limit, and no filter of system calls.
    forks: bool = False
    aborts: bool = False  # whether its native code aborts where memory runs out


class Sandbox:
    """A child process that answers calls. Thread-safe; calls take turns."""

    def __init__(
        self,
        target: Target,
        *arguments: Any,
        what: str,
        limits: Limits = Limits(),
        file: Path | None = None,
        parent: Sandbox | None = None,
    ) -> None:
        """Start a child that calls `target(*arguments)`, a function or class of a module.

        `ready` waits for the result; if that is callable, `call` calls it. All values are JSON.

        what: begins the messages of errors, for example "m.params"
        file: the only file that it may change, and not in size: the target gets one more argument,
            a descriptor of it
        parent: a child with `Limits.forks` that forks it; they end together

        Raises `Overloaded` where no process can be started in time.
        """
        self._what, self._limits = what, limits
        self._calls, self._ending = threading.Lock(), threading.Lock()
        self._kill_reason = ENDED
        self._connection, theirs = socket.socketpair()
        self._status, their_status = socket.socketpair()
        orders = {
            "target": f"{target.__module__}:{target.__qualname__}",
            "arguments": arguments,
            "limits": asdict(limits),
            "file": file and os.path.abspath(file),
        }
        self.pid: int | None = None  # None once the child is known to have ended
        with theirs, their_status:
            try:
                start = _helper.start if parent is None else parent._fork
                self.pid = start(orders, theirs, their_status)
            except BaseException as error:
                self._close()
                if not isinstance(error, OSError | ValueError | _NotForked):
                    raise
                why = f"no process can be had for {what}: {error}"
                raise Overloaded(why) from error

    def ready(self, timeout_s: float) -> Any:
        """Wait for the target's result, None if callable; once, before `call`. Raises as `call`."""
        return self._exchange(None, timeout_s)

    def call(self, *arguments: Any, timeout_s: float) -> Any:
        """Return what the child's callable returns for these arguments.

        Raises the `EngineError` that it raises; `ArtifactError` if the child ends or has not
        answered after `timeout_s`, which kills it (`pid` is None then, not where it raised one);
        `EngineUnavailable` if it was killed from outside or lost with the helper, which says
        nothing about its data.
        """
        return self._exchange(list(arguments), timeout_s)

    def _fork(self, orders: Any, connection: socket.socket, status: socket.socket) -> int:
        """Fork a child from this one; return its pid. Raises `OSError`, `ValueError`."""
        self._calls.acquire()
        try:
            if self.pid is None:
                raise ConnectionError(self._kill_reason)
            self._connection.settimeout(HELPER_S)
            return _fork_from(self._connection, orders, connection, status)
        except (ConnectionError, TimeoutError, ValueError):
            self.kill(ENDED)
            raise
        finally:
            self._end_call()

    def _end_call(self) -> None:
        self._calls.release()
        if self.pid is None:  # checked last: `kill` closes it unless a call is under way
            self._close()

    def kill(self, reason: str = "it was cancelled") -> None:
        """Kill the child, from any thread; calls that wait for it fail with `reason`."""
        with self._ending:
            if self.pid is None:
                return
            self._kill_reason, self.pid = reason, None
            # The helper then kills the child: only a parent knows that a pid is still its child's.
            with contextlib.suppress(OSError):
                self._status.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        if self._calls.acquire(blocking=False):  # else the call under way closes it
            self._close()
            self._calls.release()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def _close(self) -> None:
        self._connection.close()
        self._status.close()

    def _exchange(self, message: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        if not self._calls.acquire(timeout=timeout_s):
            raise self._too_slow(timeout_s)
        try:
            if self.pid is None:
                raise self._gone()
            try:
                if message is not None:
                    self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
                    send(self._connection, message)
                answer = receive(self._connection, self._limits.answer_mib * MIB, deadline)
                if not isinstance(answer, dict):
                    raise ValueError("an answer that is no object")
            except TimeoutError:
                self.kill(ENDED)
                raise self._too_slow(timeout_s) from None
            except ValueError as error:
                self.kill(ENDED)
                raise self._error(f"it gave {error}") from None
            except OSError:
                raise self._death() from None
            if "error" in answer:
                raise self._raised(answer["error"])
            return answer.get("value")
        finally:
            self._end_call()

    def _raised(self, error: Any) -> EngineError:
        """Return the exception for an error that was raised in the child."""
        name, message = (str(error.get(key)) for key in ("type", "message"))
        if name == "MemoryError":
            return self._too_large()
        return named(name, message) or self._error(f"its reader failed ({name})")

    def _death(self) -> EngineError:
        """Return the exception for a child that closed its connection, by its exit status."""
        if self.pid is None:
            return self._gone()
        self._status.settimeout(STATUS_S)
        try:
            status = int(self._status.recv(16))
        except (OSError, ValueError):
            status = None
        if self.pid is None:
            return self._gone()
        self.kill(ENDED)
        if status in (None, -signal.SIGKILL):
            how = "was killed, as for want of memory" if status else "went away"
            return EngineUnavailable(f"{self._what} {UNREADABLE}its reader {how}")
        if status == -signal.SIGXCPU:
            return self._error(f"it took more than {self._limits.cpu_s} s of computing")
        if status == -signal.SIGABRT and self._limits.aborts:
            return self._too_large()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return self._error(f"its reader crashed ({how})")

    def _too_large(self) -> ArtifactError:
        return self._error(f"it took more than {self._limits.memory_mib} MiB")

    def _gone(self) -> ArtifactError:
        return self._error(self._kill_reason)

    def _too_slow(self, seconds: float) -> ArtifactError:
        return self._error(f"it took more than {seconds:g} s")

    def _error(self, why: str) -> ArtifactError:
        return ArtifactError(f"{self._what} {UNREADABLE}{why}")


class _NotForked(Exception):
    """No child could be forked; a new process that forks would end the children of this one."""


def _fork_from(
    control: socket.socket, orders: Any, connection: socket.socket, status: socket.socket
) -> int:
    """Send orders and a child's sockets to a process that forks it; return the child's pid."""
    socket.send_fds(control, [b"+"], [connection.fileno(), status.fileno()])
    send(control, orders)
    answer = receive(control, 1000, time.monotonic() + HELPER_S)
    if "error" in answer:
        raise _NotForked(answer["error"])
    return int(answer["pid"])


class _Helper:
    """The process that forks the children, started for the first and again if it is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._modules: tuple[str, ...] = ()

    def start(self, orders: Any, connection: socket.socket, status: socket.socket) -> int:
        """Fork a child with the two sockets; return its pid. Raises `OSError`, `ValueError`."""
        with self._lock:
            for fresh in (False, True):
                if fresh or self._socket is None:
                    self._start_helper()
                assert self._socket is not None
                try:
                    return _fork_from(self._socket, orders, connection, status)
                except (OSError, ValueError):
                    if fresh:
                        raise
            raise AssertionError("it was returned or raised")

    def _start_helper(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(HELPER_S)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "engine.sandbox.zygote"),
                    *(str(theirs.fileno()), *self._modules),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # It forks, so it must have one thread only, and its children need no more.
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )

    def prepare(self, *modules: str) -> None:
        """Start the process, which also imports `modules`, without waiting for its imports."""
        with self._lock:
            self._modules = modules
            if self._socket is None:
                self._start_helper()

    def close(self) -> None:
        """End the process and its children."""
        with self._lock:
            if self._socket is not None and self._process is not None:
                self._socket.close()
                self._process.wait(HELPER_S)
                self._socket = self._process = None


_helper = _Helper()
atexit.register(_helper.close)
prepare = _helper.prepare  # called early, so that the first sandbox does not wait


def again(work: Callable[[], T]) -> T:
    """Call `work`; repeat it once if a sandbox was killed or lost (`EngineUnavailable`)."""
    try:
        return work()
    except EngineUnavailable:
        return work()
