"""The signals that stop the server, handled from the entrypoint's first line on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def unblock() -> None:
    """Let stop signals through that the image's entrypoint has blocked: now they have handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


class StopSignals:
    """Records SIGTERM, SIGINT and SIGHUP, and wakes `sleep`. A SIGHUP ignored by nohup stays so.

    Before it exists, PID 1 loses these signals unless they are blocked, as `env` does in the image
    before Python starts: they then wait for it. It is made before the server's imports. It imports
    little itself, and nothing of ours.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # the first one
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

        def stop(number: int, frame: Any) -> None:
            self.received = self.received or number

        for number in STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # it wakes `sleep`, too
        unblock()

    def sleep(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a signal, such as that of an exited child."""
        select.select([self._reader], [], [], max(seconds, 0))
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def close(self) -> None:
        """Close what wakes `sleep`. Signals are still recorded while the interpreter ends."""
        signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)
