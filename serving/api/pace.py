"""The pace that a client must hold while it sends a body or reads an answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable


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
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin a window, in place of the current one."""
        self.stop()
        if (moved := self._moved()) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window_s, self._check, moved)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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
