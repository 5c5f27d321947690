"""Places, lines and deadlines, with a clock that only the tests move."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.errors import Timeout, TooManyRequests, Unavailable
from serving.models.admission import Admission, Line
from tests.serving.api.gateways import settle

NEVER = 1e9


class World:
    """Requests that begin and end when a test says so."""

    def __init__(self, max_waiting: int = 1000) -> None:
        self.now = 0.0
        self.admission = Admission(max_waiting, lambda: self.now)
        self.begun: list[Any] = []
        self._go_on: dict[Any, asyncio.Event] = {}
        self._lines: list[Line] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, line: Line, name: Any, end: float = NEVER) -> asyncio.Task[None]:
        self._lines.append(line)
        self._go_on[name] = asyncio.Event()

        async def work() -> None:
            async with self.admission.place(line, end):
                self.begun.append(name)
                await self._go_on[name].wait()

        task = asyncio.create_task(work())
        self._tasks.append(task)
        await settle()
        return task

    async def answer(self, *names: Any) -> None:
        for name in names:
            self._go_on[name].set()
        await settle()

    async def end(self) -> None:
        """Answers all requests; then no line may have a running or waiting one."""
        await self.answer(*self._go_on)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert {(line.running, len(line.waiting)) for line in self._lines} == {(0, 0)}


async def test_as_many_as_there_are_places_work_at_once_and_the_rest_by_arrival() -> None:
    world, line = World(), Line(capacity=2)
    for number in range(5):
        await world.ask(line, number)
    assert world.begun == [0, 1]
    await world.answer(1)
    assert world.begun == [0, 1, 2]
    await world.answer(0, 2)
    assert world.begun == [0, 1, 2, 3, 4]
    await world.end()


@pytest.mark.parametrize("its_turn", [False, True])
async def test_who_leaves_the_line_takes_no_place_also_as_its_turn_comes(its_turn: bool) -> None:
    world, line = World(), Line()
    tasks = [await world.ask(line, number) for number in range(3)]
    if its_turn:
        world._go_on[0].set()
        while len(line.waiting) == 2:  # until the first has left its place
            await asyncio.sleep(0)
    tasks[1].cancel()
    await settle()
    await world.answer(0)
    assert world.begun == [0, 2]
    await world.end()


async def test_one_that_fails_gives_its_place_back() -> None:
    world, line = World(), Line()
    with pytest.raises(ValueError, match="odd"):
        async with world.admission.place(line, NEVER):
            raise ValueError("odd")
    await world.ask(line, "next")
    assert world.begun == ["next"]
    await world.end()


async def test_what_is_past_its_end_never_begins() -> None:
    world, line = World(), Line()
    await world.ask(line, "long")
    late, early = await world.ask(line, "late", end=5), await world.ask(line, "early", end=50)
    world.now = 6
    await world.answer("long")
    assert world.begun == ["long", "early"]
    assert isinstance(late.exception(), Timeout)
    await world.end()
    assert early.exception() is None


async def test_a_full_line_says_when_to_come_back_by_the_measured_pace() -> None:
    world, line = World(), Line(capacity=2, max_waiting=3)
    for number in range(4):  # four that take 10 s each, two at a time
        await world.ask(line, number)
    world.now = 10
    await world.answer(0, 1)
    world.now = 20
    await world.answer(2, 3)
    for number in range(4, 9):
        await world.ask(line, number)
    refused = await world.ask(line, "one more")
    error = refused.exception()
    assert isinstance(error, TooManyRequests)
    assert error.status == 429
    assert error.retry_after_s == 20  # four before it begins to work, two each 10 s
    await world.end()


async def test_one_that_cannot_begin_in_time_is_told_at_once() -> None:
    world, line = World(), Line(capacity=2)
    for number in range(2):
        await world.ask(line, number)
    world.now = 10
    await world.answer(0, 1)  # ten seconds each
    for number in range(2, 6):
        await world.ask(line, number)
    assert len(line.waiting) == 2  # the next begins after two rounds, one of which may be over
    refused = await world.ask(line, "short", end=world.now + 9)
    assert isinstance(refused.exception(), TooManyRequests)
    waits = await world.ask(line, "patient", end=world.now + 11)
    assert not waits.done()
    await world.end()


async def test_where_nothing_was_measured_nobody_is_refused_early() -> None:
    world, line = World(), Line()
    tasks = [await world.ask(line, number, end=1) for number in range(20)]
    assert not any(task.done() for task in tasks)
    await world.end()
    assert world.begun == list(range(20))


async def test_no_model_takes_the_places_of_another() -> None:
    world = World(max_waiting=4)
    busy, other = Line(), Line()
    crowd = [await world.ask(busy, ("busy", number)) for number in range(5)]
    assert isinstance((await world.ask(busy, "one more")).exception(), Unavailable)
    await world.ask(other, "works")
    waits = await world.ask(other, "waits")
    assert not waits.done()
    assert isinstance(crowd[4].exception(), Unavailable)  # the last of the longest line
    second = await world.ask(other, "waits, too")
    assert not second.done()
    assert isinstance((await world.ask(other, "one more")).exception(), Unavailable)
    assert [len(busy.waiting), len(other.waiting)] == [2, 2]
    await world.end()


async def test_a_newcomer_takes_the_place_of_a_request_cancelled_in_the_same_turn() -> None:
    world = World(max_waiting=3)
    busy, other = Line(), Line()
    crowd = [await world.ask(busy, ("소월", number)) for number in range(4)]
    await world.ask(other, "동주")
    # After it the next request runs, and only then the cancelled one, which leaves the queue.
    asyncio.get_running_loop().call_soon(crowd[3].cancel)
    waits = await world.ask(other, "동주, too")
    assert not waits.done()
    assert crowd[3].cancelled()
    assert [len(busy.waiting), len(other.waiting)] == [2, 1]
    await world.end()


async def test_more_places_are_taken_when_there_are_more() -> None:
    world, line = World(), Line()
    for number in range(4):
        await world.ask(line, number)
    line.capacity = 3
    await world.answer(0)
    assert world.begun == [0, 1, 2, 3]
    await world.end()


async def test_a_pause_waits_for_running_requests_and_holds_the_others_back() -> None:
    world, line = World(), Line(capacity=2)
    for number in range(3):
        await world.ask(line, number)
    paused, resume = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        async with world.admission.paused(line, 10):
            paused.set()
            line.capacity = 1
            await resume.wait()

    pausing = asyncio.create_task(pause())
    await settle()
    await world.answer(0)
    assert (world.begun, paused.is_set()) == ([0, 1], False)
    with pytest.raises(Unavailable, match="being scaled"):
        async with world.admission.paused(line, 10):
            pass
    await world.answer(1)
    await world.ask(line, 3)
    assert (world.begun, paused.is_set()) == ([0, 1], True)
    resume.set()
    await pausing
    await settle()
    assert world.begun == [0, 1, 2]
    await world.end()
