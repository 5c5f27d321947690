"""Admission of requests to models: a queue for each model in the gateway, and 429 when it is full.

Multi Model Server and the engine get only as many requests as they work on at once. So a waiting
request can get a Retry-After, time out or be cancelled at no cost to them.
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
PACES = 32  # recent requests whose mean duration predicts the wait; more: slower to follow changes


@dataclass(eq=False)
class Line:
    """The queue of one model: the number of running requests, and the waiting ones by arrival.

    `capacity` is the maximum of `running`, `max_waiting` that of the waiting requests.
    """

    capacity: int = 1
    max_waiting: int = 256
    running: int = 0
    idle: asyncio.Event | None = None  # while requests are held back: set once none runs
    waiting: deque[Waiter] = field(default_factory=deque)
    # Durations of the most recent requests, in seconds.
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES))

    def wait_s(self) -> float:
        """Return the expected wait of a new request, from the mean duration of recent ones."""
        if not self.paces:
            return 1.0
        return (len(self.waiting) + 1) / self.capacity * fmean(self.paces)

    def least_wait_s(self) -> float:
        """Return the least wait of a new request, from the shortest duration of recent ones."""
        return len(self.waiting) // self.capacity * min(self.paces, default=0.0)


@dataclass(eq=False)
class Waiter:
    turn: asyncio.Future[None]
    end: float


class Admission:
    """Admits requests to all models. Deadlines are times of the clock `now`."""

    def __init__(
        self, max_waiting: int = MAX_WAITING, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_waiting, self._now = max_waiting, now
        self._lines: set[Line] = set()  # the queues that are not empty

    @contextlib.asynccontextmanager
    async def place(self, line: Line, end: float) -> AsyncIterator[None]:
        """Wait in a model's queue, then count as one of its running requests until the exit.

        Raises `TooManyRequests` if the queue is full or too long for a turn before `end`,
        `Unavailable` if all queues together are full, and `Timeout` if the turn comes after `end`.
        """
        await self._enter(line, end)
        began = self._now()
        try:
            yield
        finally:
            line.paces.append(self._now() - began)
            self._leave(line)

    @contextlib.asynccontextmanager
    async def paused(self, line: Line, limit_s: float) -> AsyncIterator[None]:
        """Wait until no request of a queue runs, and let none begin before the exit.

        Raises `Timeout` after `limit_s`, and `Unavailable` if the queue is paused already.
        """
        if line.idle is not None:
            raise Unavailable("the model's workers are being scaled", retry_after_s=1)
        line.idle = asyncio.Event()
        if not line.running:
            line.idle.set()
        try:
            await asyncio.wait_for(line.idle.wait(), limit_s)
            yield
        except asyncio.TimeoutError:
            raise Timeout(f"the model's requests did not end within {limit_s:g} s") from None
        finally:
            line.idle = None
            self._admit(line)

    async def _enter(self, line: Line, end: float) -> None:
        if line.running < line.capacity and not line.waiting and line.idle is None:
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
                self._leave(line)  # its turn had come before it was cancelled
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
        """Rejects the last request of the longest queue, or the new one if its queue is as long."""
        longest = max(self._lines, key=lambda line: len(line.waiting))
        full = Unavailable("too many requests are waiting", retry_after_s=longest.wait_s())
        if len(longest.waiting) <= len(newcomer.waiting) + 1:
            raise full
        waiter = longest.waiting.pop()
        if not waiter.turn.done():  # else it was cancelled, and its task has yet to run
            waiter.turn.set_exception(full)

    def _leave(self, line: Line) -> None:
        line.running -= 1
        if line.idle is not None:
            if not line.running:
                line.idle.set()
            return
        self._admit(line)

    def _admit(self, line: Line) -> None:
        """Begins the first waiting requests, up to the capacity."""
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
