"""The script processes of one model: one for each connection of Multi Model Server."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from common.errors import EngineError
from handlers.user_code import descendants
from handlers.user_code.messages import Answer, Request, ScriptError
from handlers.user_code.process import ScriptProcess

logger = logging.getLogger(__name__)

TIDY_S = 0.5


class ScriptPool:
    """Thread-safe. A connection has one batch in flight, so there is a free process for each."""

    def __init__(self, make: Callable[[], ScriptProcess]) -> None:
        self._make = make
        self._free: list[ScriptProcess] = []
        self._changed = threading.Condition()
        self._count = self._connections = 0

    def load(self) -> None:
        """Starts the first process. Raises why its script does not load."""
        process = self._make()
        process.start()
        process.wait_until_loaded()
        self._give_back(process, new=True)
        threading.Thread(target=self._tidy, name="tidy", daemon=True).start()

    def connected(self) -> None:
        """One more connection: one more process, unless there is one for it. Waits for its load,
        but one that does not load or start is only logged: it is tried again when it is needed."""
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
            why = error.message if isinstance(error, EngineError) else str(error)
            logger.error("one more process of the model's script: %s", why)
        finally:
            self._give_back(process)

    def disconnected(self) -> None:
        with self._changed:
            self._connections -= 1
            if self._count <= self._connections or not self._free:
                return
            process = self._free.pop()
            self._count -= 1
        process.stop()

    def ask(self, requests: Sequence[Request], timeout_s: float) -> list[Answer | EngineError]:
        with self._process(timeout_s) as process:
            return process.ask(requests, timeout_s)

    def _tidy(self) -> None:
        """What a process leaves that ends while nobody asks does not wait for the next request."""
        while True:
            time.sleep(TIDY_S)
            descendants.reap()
            with self._changed:
                ended = [process for process in self._free if process.has_ended]
                self._free = [process for process in self._free if process not in ended]
            for process in ended:  # that takes seconds where what it has left keeps forking
                try:
                    process.stop()
                finally:
                    self._give_back(process)

    @contextlib.contextmanager
    def _process(self, timeout_s: float) -> Iterator[ScriptProcess]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                raise ScriptError("no process of the model's script is free", 503, retry_after_s=1)
            process = self._free.pop()
        try:
            yield process
        finally:
            self._give_back(process)

    def _give_back(self, process: ScriptProcess, new: bool = False) -> None:
        with self._changed:
            self._count += new
            self._free.append(process)
            self._changed.notify()
