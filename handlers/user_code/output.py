"""Copies a script's output to the worker's log, at a limited rate.

Multi Model Server reads a worker's output line by line into memory, so unlimited output or an
endless line would use up the server's memory. Output above the limits is dropped.
"""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

MAX_LINE_BYTES = 8192  # longer lines are split
# A token bucket of bytes in the server's log: its size, and the rate at which it refills. Larger
# values drop less output of a busy script, and fill the log faster.
BURST_BYTES = 1 << 20
BYTES_PER_S = 64 << 10
# What the server's log has around a line: time, level, thread and the names of the fields, 115
# bytes and the model's id. A smaller value lets short lines exceed the limits.
LINE_BYTES = 160
# Characters that JSON writes as six bytes, and those that it writes as two.
CONTROLS, QUOTED = re.compile(r"[\x00-\x1f\x7f-\x9f]"), re.compile(r'["\\]')
LINE_ENDS = re.compile("[\r\n\x85\u2028\u2029]+")  # of Java's reader of lines (`Scanner`)


def print_anything() -> None:
    """Make `print` write lone surrogates as escapes: as UTF-8 they would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Output:
    """The output of all processes of a worker's script, which share one limit.

    A process that is restarted for each request has no limit of its own. `write` gets lines.
    """

    def __init__(
        self, write: Callable[[bytes], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._budget, self._last = float(BURST_BYTES), clock()
        self._dropped = 0  # bytes of output since the last line

    def relay(self, stream: IO[bytes], name: str) -> None:
        """Copy the lines of `stream` in a thread, prefixed with the model's `name`."""
        thread = threading.Thread(target=self.copy, args=(stream, name), name="output", daemon=True)
        thread.start()

    def copy(self, stream: IO[bytes], name: str) -> None:
        """Copy the lines of `stream` until it ends."""
        name = name.encode("utf-8", "backslashreplace").decode()
        with stream:
            while read := stream.readline(MAX_LINE_BYTES):
                with self._lock:
                    for text in LINE_ENDS.split(read.decode("utf-8", "backslashreplace")):
                        if text:
                            self._add(name, text)
        with self._lock:
            if self._dropped and self._pay(note := self._note(name)):
                self._print(note)

    def _add(self, name: str, text: str) -> None:
        lines = [*([self._note(name)] if self._dropped else []), f"{name}: {text}"]
        if not self._pay(*lines):
            self._dropped += len(text.encode())
            return
        self._dropped = 0
        for line in lines:
            self._print(line)

    def _note(self, name: str) -> str:
        return (
            f"{name}: {self._dropped} bytes of output were dropped, the limit is {BYTES_PER_S} a"
            " second, as the log writes it"
        )

    def _pay(self, *lines: str) -> bool:
        """Return whether all lines fit into the budget, which is then reduced by them."""
        now = self._clock()
        self._budget += (now - self._last) * BYTES_PER_S
        self._budget, self._last = min(self._budget, BURST_BYTES), now
        needed = sum(map(logged_bytes, lines))
        if needed > self._budget:
            return False
        self._budget -= needed
        return True

    def _print(self, line: str) -> None:
        self._write(line.encode() + b"\n")


def logged_bytes(line: str) -> int:
    """Return the size of a line in the server's log, where it is a text of a JSON object."""
    escapes = 5 * len(CONTROLS.findall(line)) + len(QUOTED.findall(line))
    return LINE_BYTES + len(line.encode()) + escapes


def _to_stdout(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


relay = Output(_to_stdout).relay  # a worker has one model
