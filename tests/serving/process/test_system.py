"""Real processes, as the supervisor sees them."""

from __future__ import annotations

import threading

from serving.process.system import Poll


def test_a_poll_answers_at_once_and_asks_until_it_is_enough() -> None:
    asked, go = threading.Semaphore(0), threading.Semaphore(0)
    answers = iter([1, 2, 3])

    def ask() -> int:
        asked.release()
        assert go.acquire(timeout=10)
        return next(answers)

    poll = Poll(ask, 0, lambda answer: None if answer == 2 else 0.0)
    for latest in (0, 1):
        assert asked.acquire(timeout=10)
        assert poll() == latest
        go.release()
    for thread in [t for t in threading.enumerate() if t.name == "poll"]:
        thread.join(10)
    assert poll() == 2
