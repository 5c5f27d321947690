"""Admission: the one queue of requests between clients and each model.

Multi Model Server and the engine get only as many requests as they work on at once. So a waiting
request can get a Retry-After, time out or be cancelled without any cost to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from statistics import fmean

from serving.errors import Timeout, TooManyRequests, Unavailable

MAX_WAITING = 1024  # for all models together
PACES = 32  # last requests whose mean duration predicts the wait; more react later to changes


@dataclass(eq=False)
class Line:
    """One model's requests: `running` of at most `capacity`, and those that wait, by arrival."""

    capacity: int = 1
    max_waiting: int = 256
    running: int = 0
    waiting: deque[Waiter] = field(default_factory=deque)
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES))  # seconds each took

    def wait_s(self) -> float:
        """The expected wait of one more request, at the mean duration of the last ones."""
        if not self.paces:
            return 1.0
        return (len(self.waiting) + 1) / self.capacity * fmean(self.paces)

    def least_wait_s(self) -> float:
        """The least wait: as `wait_s`, at the shortest duration and with no request running."""
        return len(self.waiting) // self.capacity * min(self.paces, default=0.0)


@dataclass(eq=False)
class Waiter:
    turn: asyncio.Future[None]
    end: float


class Admission:
    """Admits requests to all models. Times are those of the clock `now`."""

    def __init__(
        self, max_waiting: int = MAX_WAITING, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_waiting, self._now = max_waiting, now
        self._lines: set[Line] = set()  # with waiting requests

    @contextlib.asynccontextmanager
    async def place(self, line: Line, end: float) -> AsyncIterator[None]:
        """Holds one of a model's places, waiting for it; cancelling leaves the line.

        Raises `TooManyRequests` if the line is full or too long to be at its head before `end`,
        `Unavailable` if all lines together are, and `Timeout` if `end` comes first.
        """
        await self._enter(line, end)
        began = self._now()
        try:
            yield
        finally:
            line.paces.append(self._now() - began)
            self._leave(line)

    async def _enter(self, line: Line, end: float) -> None:
        if line.running < line.capacity and not line.waiting:
            line.running += 1
            return
        self._check(line, end)
        waiter = Waiter(asyncio.get_running_loop().create_future(), end)
        line.waiting.append(waiter)
        self._lines.add(line)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in line.waiting:
                line.waiting.remove(waiter)
                self._forget_if_empty(line)
            elif waiter.turn.done() and not waiter.turn.cancelled() and not waiter.turn.exception():
                self._leave(line)  # it got its place in the same moment
            raise

    def _check(self, line: Line, end: float) -> None:
        if len(line.waiting) >= line.max_waiting:
            raise TooManyRequests(
                f"{line.max_waiting} requests to this model are waiting already",
                retry_after_s=line.wait_s(),
            )
        if self._now() + line.least_wait_s() >= end:
            raise TooManyRequests(
                f"{len(line.waiting)} requests to this model are waiting, too many for one more to"
                " be answered in time",
                retry_after_s=line.wait_s(),
            )
        if sum(len(other.waiting) for other in self._lines) >= self._max_waiting:
            self._shorten_the_longest(line)

    def _shorten_the_longest(self, newcomer: Line) -> None:
        """Rejects the last request of the longest line, so that models share the queue fairly."""
        longest = max(self._lines, key=lambda line: len(line.waiting))
        full = Unavailable("too many requests are waiting", retry_after_s=longest.wait_s())
        if len(longest.waiting) <= len(newcomer.waiting) + 1:
            raise full
        longest.waiting.pop().turn.set_exception(full)

    def _leave(self, line: Line) -> None:
        line.running -= 1
        while line.waiting and line.running < line.capacity:
            waiter = line.waiting.popleft()
            if waiter.turn.done():
                continue
            if waiter.end <= self._now():
                waiter.turn.set_exception(Timeout("it was not this request's turn in time"))
                continue
            line.running += 1
            waiter.turn.set_result(None)
        self._forget_if_empty(line)

    def _forget_if_empty(self, line: Line) -> None:
        if not line.waiting:
            self._lines.discard(line)
