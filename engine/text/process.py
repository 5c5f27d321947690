"""Text processes: each runs a tokenizer and its chat template in a sandbox.

A process that stalls, crashes or uses up its memory does not affect other models. Models with the
same files and settings share a process.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, DeadlineExceeded, EngineError, EngineUnavailable
from engine.sandbox import UNREADABLE, Limits, Sandbox, again
from engine.text import child as text_child
from engine.text.constraint import Vocabulary
from engine.text.table import Table

LOAD_S = 20.0  # a wide limit for reading a tokenizer and making its table
MEMORY_MIB = 512
# Processes that stay alive without requests, 17 MB each. With a smaller number requests wait more
# often for a process to start, 30 to 100 ms.
MAX_IDLE_PROCESSES = 8


@dataclass(frozen=True)
class About:
    """The ids and tables that a text process has read from its files."""

    stop_ids: frozenset[int]
    special_ids: frozenset[int]  # of tokens that are no text, `stop_ids` included
    table: Table
    vocabulary: Vocabulary  # of that table, for constraints

    @classmethod
    def from_json(cls, value: Any, file: str, vocab_size: int) -> About:
        """Check what a process has sent. Raises `ArtifactError`."""
        try:
            table = Table.from_json(value["table"])
            if not 0 < len(table) <= vocab_size:  # masks have a bit for each piece
                raise ValueError(f"{len(table)} pieces")
            # An artifact may name end tokens that its model lacks, such as GPT-2's 50256.
            stop_ids = frozenset(i for i in map(int, value["stop_ids"]) if 0 <= i < len(table))
            special_ids = stop_ids.union(map(int, value["special_ids"]))
            return cls(stop_ids, special_ids, table, Vocabulary(table, stop_ids))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ArtifactError(f"{file} cannot be used: its process gave no table") from None


class Turns:
    """A thread that runs queued tasks, one task of each user in turn. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: OrderedDict[Hashable, deque[Callable[[], None]]] = OrderedDict()
        self._closed = False
        threading.Thread(target=self._run, name="texts", daemon=True).start()

    def soon(self, user: Hashable, task: Callable[[], None]) -> None:
        """Queue a task, which must not raise."""
        with self._changed:
            self._tasks.setdefault(user, deque()).append(task)
            self._changed.notify()

    def waiting(self, user: Hashable) -> int:
        return len(self._tasks.get(user, ()))

    def take(self, user: Hashable) -> deque[Callable[[], None]]:
        """Remove and return a user's queued tasks."""
        with self._changed:
            return self._tasks.pop(user, deque())

    def close(self) -> None:
        """End the thread after the queued tasks."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                user, tasks = self._tasks.popitem(last=False)
                task = tasks.popleft()
                if tasks:
                    self._tasks[user] = tasks
            task()
            del task  # free what the task references while this thread waits


class TextProcess:
    """A text process. `call` runs on the thread of its `turns`, the rest is thread-safe."""

    def __init__(self, about: About | None, before_start: Callable[[], None]) -> None:
        """Start no process yet.

        `about` is what an earlier process with the same files has read; `before_start` is called
        before a process starts.
        """
        self.about, self._before_start = about, before_start
        self.turns = Turns()
        # Each user with a function that returns whether it is idle; guarded by `TextProcesses`.
        self.users: dict[Hashable, Callable[[], bool]] = {}
        self.used_at = time.monotonic()
        self._child: Sandbox | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id, or None while no process runs."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the process, and the thread after its queued tasks. Does not block."""
        self._closed = True
        self.turns.close()
        self._end()

    def end_when_idle(self) -> None:
        """End the process unless a queued task uses it; a call restarts it."""
        used_at = self.used_at

        def end() -> None:
            if self.used_at == used_at:
                self._end()

        self.turns.soon(None, end)

    def _end(self) -> None:
        self._kill("it is not needed")
        if self.about is not None:
            self.about.vocabulary.end()

    def _kill(self, reason: str) -> None:
        if self._child is not None:
            self._child.kill(reason)

    def open(self, source: text_child.Source) -> None:
        """Start the process unless it runs. Raises `ArtifactError`, `EngineUnavailable`."""
        self.used_at = time.monotonic()
        if self.pid is None:
            self._before_start()
            again(lambda: self._open(source))

    def _open(self, source: text_child.Source) -> None:
        file, limits = Path(source[0]).name, Limits(MEMORY_MIB)
        self._child = child = Sandbox(text_child.serve, *source, what=file, limits=limits)
        try:
            if self._closed:
                raise EngineUnavailable(f"the process of {file} is closed: its model was unloaded")
            child.ready(LOAD_S)
            if self.about is None:
                value = child.call("about", timeout_s=LOAD_S)
                self.about = About.from_json(value, file, source[2]["vocab_size"])
        except BaseException:
            child.kill()
            raise

    def call(self, source: text_child.Source, timeout_s: float, *arguments: Any) -> Any:
        """Call a method of the process; start the process from `source` if it has ended.

        The call is repeated once if the process ended during it, because the process may have been
        killed long before. Raises the errors of `open` and of the method, `DeadlineExceeded` if the
        process stalls, `EngineUnavailable` if it is lost with all other sandboxes, `EngineError` if
        it ends.
        """
        for last in (False, True):
            self.open(source)
            assert self._child is not None
            began = time.monotonic()
            try:
                return self._child.call(*arguments, timeout_s=timeout_s)
            except (ArtifactError, EngineUnavailable) as error:
                kind = EngineUnavailable if isinstance(error, EngineUnavailable) else EngineError
                late = time.monotonic() - began >= timeout_s
                ended = self.pid is None
                why = error.message.removeprefix(f"{Path(source[0]).name} {UNREADABLE}")
                failure = self.fail(why, DeadlineExceeded if late else kind)
                if last or late or self._closed or not ended:
                    raise failure from None
        raise AssertionError("it was returned or raised")

    def fail(self, why: str, kind: type[EngineError] = EngineError) -> EngineError:
        """End the process and return the error of its call; the next call starts another."""
        self._kill("it failed")
        return kind(f"the process of the tokenizer and chat template ended: {why}")


class TextProcesses:
    """The text processes, one for each digest. Thread-safe."""

    def __init__(self) -> None:
        self.writer = Turns()  # writes texts of models whose tables decode
        self._lock = threading.Lock()
        self._processes: dict[str, TextProcess] = {}
        self._known: OrderedDict[str, About] = OrderedDict()  # of the processes that ended last

    def acquire(self, digest: str, user: Hashable, is_idle: Callable[[], bool]) -> TextProcess:
        """Return the process of a digest, until `release`; it may end while all users are idle."""
        with self._lock:
            process = self._processes.get(digest)
            if process is None:
                process = TextProcess(self._known.pop(digest, None), self._end_idle)
                self._processes[digest] = process
            process.users[user] = is_idle
            return process

    def release(self, digest: str, user: Hashable) -> None:
        """Close the process after its last user. Does not block."""
        with self._lock:
            process = self._processes[digest]
            del process.users[user]
            if process.users:
                return
            del self._processes[digest]
            if process.about is not None:
                self._known[digest] = process.about
                while len(self._known) > MAX_IDLE_PROCESSES:
                    self._known.popitem(last=False)
        process.close()

    def _end_idle(self) -> None:
        """End idle processes, except the `MAX_IDLE_PROCESSES` that were used last."""
        with self._lock:
            running = [p for p in self._processes.values() if p.pid is not None]
            idle = [p for p in running if all(is_idle() for is_idle in p.users.values())]
        idle.sort(key=lambda process: process.used_at, reverse=True)
        for process in idle[MAX_IDLE_PROCESSES:]:
            process.end_when_idle()

    def close(self) -> None:
        self.writer.close()
