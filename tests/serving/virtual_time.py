"""An event loop whose clock stands still while anything can happen, and then jumps."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

REAL_S = 60.0  # how long a thread may really take


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        if self.loop.threads > 0:
            ready = super().select(REAL_S)
            assert ready, "a thread takes too long"
            return ready
        assert timeout is not None, "nothing will ever happen any more"
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual. It waits for work in threads, but not for work that `hangs`."""

    def __init__(self) -> None:
        self.now, self.threads = 0.0, 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        def ended(_: Any) -> None:
            self.threads -= 1

        future = super().run_in_executor(executor, func, *args)
        self.threads += 1
        future.add_done_callback(ended)
        return future

    def hangs(self, more: int) -> None:
        """Count that many more threads that wait for an event only the test sets."""
        self.threads -= more


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test in virtual time, which is `time.monotonic`'s, too."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        with mock.patch.object(time, "monotonic", loop.time):
            loop.run_until_complete(test())
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.threads += 1  # the one that waits for the others
            loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
