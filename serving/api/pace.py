"""The time limits of a client: a timer, and the pace to send a body or read an answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable


class Timer:
    """Calls a function after a time, unless it is stopped or started again before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def started(self) -> bool:
        """Whether it runs or has run out; False once it is stopped."""
        return self._handle is not None

    def start(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, act, *arguments)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Pace:
    """Calls `too_slow` after `window_s` in which fewer than `num_bytes` were moved.

    `moved` returns a number that grows by one with each byte, or None while the client has nothing
    to move: then the windows end, until the next `start`.
    """

    def __init__(
        self,
        window_s: float,
        num_bytes: int,
        moved: Callable[[], int | None],
        too_slow: Callable[[], None],
    ) -> None:
        self._window_s, self._num_bytes = window_s, num_bytes
        self._moved, self._too_slow = moved, too_slow
        self._timer = Timer()

    def start(self) -> None:
        """Begin a window, in place of the current one."""
        self._timer.stop()
        if (moved := self._moved()) is not None:
            self._timer.start(self._window_s, self._check, moved)

    def stop(self) -> None:
        self._timer.stop()

    def _check(self, before: int) -> None:
        moved = self._moved()
        if moved is None or moved - before >= self._num_bytes:
            self.start()
        else:
            self._too_slow()


def unacknowledged(connected: socket.socket) -> int:
    """Return the bytes in the kernel that the peer has not acknowledged (Linux's SIOCOUTQ).

    The asyncio buffer does not show a slow reader's progress: the kernel takes its next bytes only
    when some 100 KB of those before have gone.
    """
    with contextlib.suppress(OSError, ValueError):  # another kernel, or a closed socket
        answer = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4))
        size: int = struct.unpack("i", answer)[0]
        return size
    return 0
