"""A tokenizer and its template in a process of their own, which may stall, crash or take all memory
without harm to others. Models with the same files and settings share one.
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
from engine.sandbox import Limits, Sandbox, again
from engine.text import child as text_child
from engine.text.constraint import Vocabulary
from engine.text.table import Table

# How long the process may take to read a tokenizer and to find out about it.
LOAD_S = 20.0
MEMORY_MIB = 512
# Of those whose models have no requests. A start takes 30 to 100 ms, a process 17 MB.
PROCESSES_KEPT = 8


@dataclass(frozen=True)
class About:
    """What a text process has found out about its files."""

    stop_ids: frozenset[int]
    special_ids: frozenset[int]  # of tokens that are no text, those among them
    table: Table
    vocabulary: Vocabulary  # of that table, for constraints

    @classmethod
    def from_json(cls, said: Any, file: str) -> About:
        try:
            stop_ids = frozenset(map(int, said["stop_ids"]))
            special_ids = stop_ids.union(map(int, said["special_ids"]))
            table = Table.from_json(said["table"])
            return cls(stop_ids, special_ids, table, Vocabulary(table, stop_ids))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ArtifactError(f"{file} cannot be used: its process gave no table") from None


class Turns:
    """A thread that runs tasks; users, of which each has some, take turns. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: OrderedDict[Hashable, deque[Callable[[], None]]] = OrderedDict()
        self._closed = False
        threading.Thread(target=self._run, name="texts", daemon=True).start()

    def soon(self, user: Hashable, task: Callable[[], None]) -> None:
        """Runs `task`, which raises nothing."""
        with self._changed:
            self._tasks.setdefault(user, deque()).append(task)
            self._changed.notify()

    def waiting(self, user: Hashable) -> int:
        return len(self._tasks.get(user, ()))

    def take(self, user: Hashable) -> deque[Callable[[], None]]:
        """What waits of a user's tasks, which then do not run."""
        with self._changed:
            return self._tasks.pop(user, deque())

    def close(self) -> None:
        """Ends the thread once it has run what waits."""
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
            del task  # and what it holds, while this waits


class TextProcess:
    """Calls are made on the thread of its `turns` alone; the rest is thread-safe."""

    def __init__(self, about: About | None, starts: Callable[[], None]) -> None:
        """`about` is what an earlier process with the same files has found out. `starts` is called
        before a process starts."""
        self.about, self._starts = about, starts
        self.turns = Turns()
        # Each with whether it has no answer in the making; guarded by `TextProcesses`.
        self.users: dict[Hashable, Callable[[], bool]] = {}
        self.used_at = time.monotonic()
        self._child: Sandbox | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if it lives."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """Ends the process and, after what waits, the thread. Does not block."""
        self._closed = True
        self.turns.close()
        self._kill("it is not needed")

    def rest(self) -> None:
        """Ends the process, unless what waits needs it, until it is needed again."""
        used_at = self.used_at

        def rest() -> None:
            if self.used_at == used_at:
                self._kill("it is not needed")

        self.turns.soon(None, rest)

    def _kill(self, reason: str) -> None:
        if self._child is not None:
            self._child.kill(reason)

    def open(self, source: text_child.Source) -> None:
        """Starts the process, unless it lives. Raises `ArtifactError` that says what is wrong with
        the tokenizer or its settings, and `EngineUnavailable`."""
        self.used_at = time.monotonic()
        if self.pid is None:
            self._starts()
            again(lambda: self._open(source))

    def _open(self, source: text_child.Source) -> None:
        file, limits = Path(source[0]).name, Limits(MEMORY_MIB)
        self._child = child = Sandbox(text_child.serve, *source, what=file, limits=limits)
        try:
            if self._closed:
                raise EngineUnavailable(f"{file} is not needed any more")
            child.ready(LOAD_S)
            if self.about is None:
                self.about = About.from_json(child.call("about", timeout_s=LOAD_S), file)
        except BaseException:
            child.kill()
            raise

    def call(self, source: text_child.Source, timeout_s: float, *arguments: Any) -> Any:
        """Calls the process, a new one of `source` if the last has ended; once more where it ended
        meanwhile, for it may have been killed long before.

        Raises what it raises, `DeadlineExceeded` if it stalls, `EngineUnavailable` if it is lost
        with all others, `EngineError` if it ends.
        """
        for last in (False, True):
            began = time.monotonic()
            try:
                self.open(source)
                began = time.monotonic()
                assert self._child is not None
                return self._child.call(*arguments, timeout_s=timeout_s)
            except (ArtifactError, EngineUnavailable) as error:
                kind = EngineUnavailable if isinstance(error, EngineUnavailable) else EngineError
                late = time.monotonic() - began >= timeout_s
                ended = self.pid is None
                failure = self.give_up(error.message, DeadlineExceeded if late else kind)
                if last or late or self._closed or not ended:
                    raise failure from None
        raise AssertionError("it was returned or raised")

    def give_up(self, why: str, kind: type[EngineError] = EngineError) -> EngineError:
        """Ends the process; the next call starts another."""
        self._kill("it was given up")
        return kind(f"the tokenizer's process ended: {why}")


class TextProcesses:
    """One for each digest that is in use. Thread-safe."""

    def __init__(self) -> None:
        self.writer = Turns()  # makes texts of tokens, for all models whose tables can
        self._lock = threading.Lock()
        self._processes: dict[str, TextProcess] = {}
        self._known: OrderedDict[str, About] = OrderedDict()  # of the last that ended

    def acquire(self, digest: str, user: Hashable, is_idle: Callable[[], bool]) -> TextProcess:
        """The process of a digest, until `release`. It may rest while all its users are idle."""
        with self._lock:
            process = self._processes.get(digest)
            if process is None:
                process = TextProcess(self._known.pop(digest, None), self._rest)
                self._processes[digest] = process
            process.users[user] = is_idle
            return process

    def release(self, digest: str, user: Hashable) -> None:
        """Closes the process with its last user. Does not block."""
        with self._lock:
            process = self._processes[digest]
            del process.users[user]
            if process.users:
                return
            del self._processes[digest]
            if process.about is not None:
                self._known[digest] = process.about
                while len(self._known) > PROCESSES_KEPT:
                    self._known.popitem(last=False)
        process.close()

    def _rest(self) -> None:
        """Ends those beyond `PROCESSES_KEPT` that were used least recently."""
        with self._lock:
            running = [p for p in self._processes.values() if p.pid is not None]
            idle = [p for p in running if all(is_idle() for is_idle in p.users.values())]
        idle.sort(key=lambda process: process.used_at, reverse=True)
        for process in idle[PROCESSES_KEPT:]:
            process.rest()

    def close(self) -> None:
        self.writer.close()
