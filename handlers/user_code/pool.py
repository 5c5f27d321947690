"""The script processes of one model: one per connection of Multi Model Server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from common.errors import EngineError
from handlers.user_code import descendants
from handlers.user_code.messages import Answer, Request, ScriptError
from handlers.user_code.process import ScriptProcess

logger = logging.getLogger(__name__)

# A crashed process's children and zombies remain at most this long while no request comes.
REAP_INTERVAL_S = 0.5


class ScriptPool:
    """Answers batches in processes, one per connection of Multi Model Server. Thread-safe.

    A connection has at most one batch in flight, so each batch has a free process.
    """

    def __init__(self, make: Callable[[], ScriptProcess]) -> None:
        self._make = make
        self._free: list[ScriptProcess] = []
        self._changed = threading.Condition()
        self._count = self._connections = 0

    def load(self) -> None:
        """Start the first process. Raises the reason if its script does not load."""
        process = self._make()
        process.start()
        process.wait_until_loaded()
        self._count += 1
        self._release(process)
        threading.Thread(target=self._reap, name="reaper", daemon=True).start()

    def connected(self) -> None:
        """Add a process if there are more connections than processes; a failure is only logged."""
        with self._changed:
            self._connections += 1
            if self._connections <= self._count:
                return
            self._count += 1
        process = self._make()
        try:
            process.start()
            process.wait_until_loaded()
        except Exception as error:  # such as EMFILE, or a thread that does not start
            reason = error.message if isinstance(error, EngineError) else str(error)
            logger.error("another process of the model's script did not start: %s", reason)
        finally:
            self._release(process)

    def disconnected(self) -> None:
        with self._changed:
            self._connections -= 1
            if self._count <= self._connections or not self._free:
                return
            process = self._free.pop()
            self._count -= 1
        process.stop()

    def answer(self, requests: Sequence[Request], timeout_s: float) -> list[Answer | EngineError]:
        """Return one answer per request. Raises an error that all requests share."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                raise ScriptError(
                    f"no process of the model's script was free within {timeout_s:g} s; try again"
                    " later",
                    503,
                    retry_after_s=1,
                )
            process = self._free.pop()
        try:
            return process.answer(requests, timeout_s)
        finally:
            self._release(process)

    def _reap(self) -> None:
        """Clean up after processes that end between requests, so that no request is delayed."""
        while True:
            time.sleep(REAP_INTERVAL_S)
            descendants.reap()
            with self._changed:
                ended = [process for process in self._free if process.has_ended]
                self._free = [process for process in self._free if process not in ended]
            for process in ended:
                try:
                    process.stop()  # takes seconds if its children keep forking
                finally:
                    self._release(process)

    def _release(self, process: ScriptProcess) -> None:
        with self._changed:
            self._free.append(process)
            self._changed.notify()
