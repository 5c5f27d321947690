"""Lingering close: a client that still sends gets its answer before the connection ends."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from serving.api.pace import Timer


class _State(enum.Enum):
    OPEN = enum.auto()
    DUE = enum.auto()  # it begins once the current answer is complete
    DISCARDING = enum.auto()  # what arrives is discarded


class Lingering:
    """Discards what a client sends after its answer, until it stops or a limit is reached.

    A close with unread data would send a TCP reset, which loses the answer; nginx lingers, too.
    `abort` is called after `limit_s` or `limit_bytes`.
    """

    def __init__(self, limit_s: float, limit_bytes: int, abort: Callable[[], None]) -> None:
        self._limit_s, self._left_bytes, self._abort = limit_s, limit_bytes, abort
        self._timer = Timer()
        self._state = _State.OPEN

    @property
    def is_due(self) -> bool:
        """Whether it begins once the current answer is complete."""
        return self._state is _State.DUE

    @property
    def discards(self) -> bool:
        """Whether what arrives is discarded."""
        return self._state is _State.DISCARDING

    def begin_after_answer(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.DUE

    def discard_rest(self) -> None:
        """Discard what arrives; the current answer's end closes the connection."""
        self._state = _State.DISCARDING

    def begin(self, transport: asyncio.Transport) -> None:
        """Send no more, and discard what arrives until a limit is reached."""
        self._state = _State.DISCARDING
        if not transport.is_closing():
            transport.write_eof()
            self._timer.start(self._limit_s, self._abort)

    def discard(self, size: int) -> None:
        """Count received bytes that are discarded."""
        self._left_bytes -= size
        if self._left_bytes < 0:
            self._abort()

    def stop(self) -> None:
        self._timer.stop()
