"""Real processes, as the supervisor sees them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time

from serving.process.system import Poll, Processes


def test_a_poll_answers_at_once_and_asks_until_it_is_enough() -> None:
    asked, go = threading.Semaphore(0), threading.Semaphore(0)
    answers = iter([1, 2, 3])

    def ask() -> int:
        asked.release()
        assert go.acquire(timeout=60)
        return next(answers)

    poll = Poll(ask, 0, lambda answer: None if answer == 2 else 0.0)
    for latest in (0, 1):
        assert asked.acquire(timeout=60)
        assert poll() == latest
        go.release()
    for thread in [t for t in threading.enumerate() if t.name == "poll"]:
        thread.join(60)
    assert poll() == 2


def test_a_poll_gives_no_answer_to_a_question_from_before() -> None:
    """As of a process that has been restarted since."""
    asked, go = threading.Semaphore(0), threading.Semaphore(0)

    def ask() -> bool:
        asked.release()
        assert go.acquire(timeout=60)
        return True

    with contextlib.closing(Poll(ask, False, lambda answer: 0.0)) as poll:
        assert asked.acquire(timeout=60)
        restarted = time.monotonic()
        go.release()
        assert asked.acquire(timeout=60)  # the first has answered
        assert poll()
        assert not poll(restarted)
        go.release()
        assert asked.acquire(timeout=60)
        assert poll(restarted)
        go.release(1000)
    assert not [t for t in threading.enumerate() if t.name == "poll"]


def test_a_check_that_fails_counts_as_unhealthy_and_the_next_one_runs() -> None:
    """As where the machine has too many open files."""
    began, go = threading.Semaphore(0), threading.Semaphore(0)
    answers = iter([True, OSError(errno.ENFILE, os.strerror(errno.ENFILE)), True])

    def check() -> bool:
        began.release()
        assert go.acquire(timeout=60)
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with contextlib.closing(Poll(check, False, lambda healthy: 0.0)) as poll:
        for healthy in (False, True, False, True):
            assert began.acquire(timeout=60)  # the check before has its result
            assert poll() is healthy
            go.release()
        go.release(1000)


FORKS = """
import os, time
print(flush=True)
while True:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    time.sleep(0.01)
"""


def test_a_session_that_is_killed_while_it_forks_leaves_nobody() -> None:
    """As Java does, which starts a worker just then. Its children are not waited for here, so what
    is left of them is a zombie at most."""
    processes = Processes.__new__(Processes)  # without becoming a subreaper
    leader = subprocess.Popen(
        [sys.executable, "-c", FORKS], start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        assert leader.stdout is not None
        leader.stdout.readline()
        processes.signal_session(leader.pid, signal.SIGKILL)
        assert processes.session(leader.pid) == []
    finally:
        for pid in processes.session(leader.pid):
            os.kill(pid, signal.SIGKILL)
        leader.stdout.close()
        leader.wait()
