"""Work that begins when futures are done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def after(
    futures: Sequence[Future[Any]], work: Callable[[], Result], cancelled: BaseException
) -> Future[Result]:
    """Return the future of `work`, which runs on the thread that completes the last of `futures`.

    The first error of one of them is its error, and `cancelled` if one of them is cancelled; the
    others are cancelled then, as they are when the future that is returned is.
    """
    made: Future[Result] = Future()
    lock, remaining = threading.Lock(), len(futures)

    def done(one: Future[Any]) -> None:
        nonlocal remaining
        error = cancelled if one.cancelled() else one.exception()
        with lock:
            due = remaining == 1 or (remaining > 0 and error is not None)
            remaining = 0 if due else remaining - 1
        if not due or not made.set_running_or_notify_cancel():
            return
        try:
            if error is not None:
                raise error
            made.set_result(work())
        except BaseException as raised:
            made.set_exception(raised)

    def cancel(_: object) -> None:
        for one in futures:
            one.cancel()

    made.add_done_callback(cancel)
    for one in futures:
        one.add_done_callback(done)
    return made


def completed(value: Result) -> Future[Result]:
    """Return a future that has its result."""
    made: Future[Result] = Future()
    made.set_result(value)
    return made
