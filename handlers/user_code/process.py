"""Starts, calls and stops one process that runs a model's own script, from its worker.

If the script crashes or hangs, the worker answers with an error. Multi Model Server sees no crash,
so clients do not wait while it restarts a worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.errors import DeadlineExceeded, EngineError, EngineUnavailable
from handlers.user_code import descendants, engine_proxy, messages
from handlers.user_code.confinement.rules import environment
from handlers.user_code.descendants import has_ended
from handlers.user_code.messages import (
    Answer,
    Request,
    ScriptError,
    out_of_memory,
    receive_from_script,
)
from handlers.user_code.output import relay

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("child.py")
# How long to wait for the exit status of a process that has closed its connection.
EXIT_TIMEOUT_S = 1.0


class ScriptProcess:
    """A process that runs a script; `answer` restarts it. Use by one thread at a time."""

    def __init__(self, name: str, spec: Mapping[str, Any], load_timeout_s: float) -> None:
        """Create a process to `start`; `spec` has the keys of `entry_point.Script.spec`."""
        self._name, self._spec, self._load_timeout_s = name, spec, load_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._loaded = False
        self._give_up_loading_at = 0.0
        self._timed_out = False

    def start(self) -> None:
        """Start the process, which begins to load the script. Raises `ScriptError`."""
        self.stop()
        try:
            self._start()
        except (OSError, RuntimeError) as error:  # RuntimeError: a thread does not start
            self.stop()
            reason = getattr(error, "strerror", None) or error
            raise ScriptError(f"the model's script cannot be started: {reason}") from None
        assert self._connection is not None
        with contextlib.suppress(OSError):  # if it has ended already, `wait_until_loaded` raises
            messages.send(self._connection, dict(self._spec))

    def _start(self) -> None:
        variables = environment(self._spec["temporary"])
        variables["PYTHONDONTWRITEBYTECODE"] = "1"  # the model's folder may be in the store
        with contextlib.ExitStack() as sockets:
            ours, theirs, engine, their_engine = (
                sockets.enter_context(end) for _ in range(2) for end in socket.socketpair()
            )
            descriptors = [theirs.fileno(), their_engine.fileno()]
            process = self._process = descendants.start(
                [sys.executable, str(PROGRAM), str(os.getpid()), *map(str, descriptors)],
                env=variables,
                cwd=self._spec["root"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
            )
            self._connection, proxied = Connection(ours.detach()), Connection(engine.detach())
        self._loaded = False
        self._give_up_loading_at = time.monotonic() + self._load_timeout_s
        model = (self._spec["engine_name"], self._spec["root"])
        threading.Thread(target=engine_proxy.serve, args=(proxied, *model), daemon=True).start()
        assert process.stdout is not None
        relay(process.stdout, self._name)

    def wait_until_loaded(self, timeout_s: float | None = None) -> None:
        """Wait for the script to load, or raise the reason why it does not.

        Raises `EngineUnavailable` if the load continues after `timeout_s`.
        """
        if self._loaded:
            return
        left_s = self._give_up_loading_at - time.monotonic()
        connection = self._connection
        if connection is None:
            raise ScriptError("the model's script is not running")
        if timeout_s is not None and timeout_s < left_s and not connection.poll(timeout_s):
            raise EngineUnavailable("the model's script is being loaded again; try again later")
        try:
            with self._killed_after(left_s):
                outcome, _ = receive_from_script(connection)
            failure = messages.error_from(outcome["error"]) if "error" in outcome else None
        except (EOFError, OSError, ValueError):
            raise self._ended("while it was loaded", self._load_timeout_s) from None
        if failure is not None:
            self.stop()
            raise failure
        self._loaded = True

    def answer(self, requests: Sequence[Request], timeout_s: float) -> list[Answer | EngineError]:
        """Return an answer or an error per request. Raises an error that all requests share."""
        end = time.monotonic() + timeout_s
        if self._process is None or has_ended(self._process):
            self.start()
        self.wait_until_loaded(timeout_s)
        assert self._connection is not None
        left_s = max(end - time.monotonic(), 0.1)
        try:
            with self._killed_after(left_s):
                messages.send_requests(self._connection, requests, left_s)
                answers = messages.answers_from(*receive_from_script(self._connection))
        except ScriptError:  # nothing was sent
            raise
        except Exception:  # the process has ended, or its message is malformed
            error = self._ended("while it answered", timeout_s)
            with contextlib.suppress(ScriptError):
                self.start()  # so that the next request need not wait
            raise error from None
        if len(answers) != len(requests):
            raise ScriptError(
                f"the model's script returned {len(answers)} answers, must be {len(requests)}: one"
                " for each request"
            )
        return answers

    @property
    def has_ended(self) -> bool:
        """True if the process has ended by itself; its children may still run until `stop`."""
        return self._process is not None and has_ended(self._process)

    def stop(self) -> None:
        """Kill the process and its children, and wait for their end."""
        process, self._process = self._process, None
        if process is not None:
            descendants.end(process)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _killed_after(self, timeout_s: float) -> Iterator[None]:
        """Kill the process after `timeout_s`, which closes its connection."""
        process = self._process
        assert process is not None

        def kill() -> None:
            self._timed_out = True
            descendants.kill(process)

        self._timed_out = False
        timer = threading.Timer(max(timeout_s, 0.0), kill)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # without a timer nothing would stop a script that hangs
            raise ScriptError(
                f"{error} for the request's timeout; try again later", 503, retry_after_s=1
            ) from None
        try:
            yield
        finally:
            timer.cancel()

    def _ended(self, when: str, timeout_s: float) -> EngineError:
        """Stop the process; return an error that explains why it ended."""
        process = self._process
        assert process is not None
        end = time.monotonic() + EXIT_TIMEOUT_S
        while not (ended := has_ended(process)) and time.monotonic() < end:
            time.sleep(0.005)
        self.stop()
        code = process.returncode if ended else None
        if self._timed_out:
            verb = "load" if when == "while it was loaded" else "answer"
            return DeadlineExceeded(
                f"the model's script did not {verb} within {timeout_s:g} s; it was stopped"
            )
        if code == -signal.SIGKILL:
            return out_of_memory(
                f"the model's script was killed {when} (SIGKILL), most likely for lack of memory"
            )
        if code is not None and code < 0:
            return ScriptError(
                f"the model's script was killed by {signal.Signals(-code).name} {when}"
            )
        did = "closed its connection" if code is None else "ended its process"
        status = "" if code is None else f" (status {code})"
        return ScriptError(f"the model's script {did} {when}{status}")
