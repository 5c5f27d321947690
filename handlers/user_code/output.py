"""What a script prints, as lines of the worker's log.

Multi Model Server reads a worker's output line by line into its own memory, so a script that prints
without end, or without line breaks, would bring down the server. Here it only loses lines.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import IO

MAX_LINE_BYTES = 8192
# So much at once, and so much each second after that.
BURST_BYTES = 1 << 20
BYTES_PER_S = 64 << 10

_write = threading.Lock()


def print_anything() -> None:
    """Has what UTF-8 cannot write, halves of surrogate pairs, printed as escapes: else printing
    such a text is an error, also where it only tells of one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def relay(stream: IO[bytes], name: str) -> None:
    """Copies the lines of `stream` to stdout in a thread, the model's name in front."""
    thread = threading.Thread(target=_relay, args=(stream, name), name="output", daemon=True)
    thread.start()


def _relay(stream: IO[bytes], name: str) -> None:
    room, dropped, last = float(BURST_BYTES), 0, time.monotonic()
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            now = time.monotonic()
            room, last = min(room + (now - last) * BYTES_PER_S, BURST_BYTES), now
            if len(line) > room:
                dropped += len(line)
                continue
            room -= len(line)
            if dropped:
                _print(f"{name}: ({dropped} bytes of output were left out: too much at once)")
                dropped = 0
            text = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
            if text:
                _print(f"{name}: {text}")
    if dropped:
        _print(f"{name}: ({dropped} bytes of output were left out: too much at once)")


def _print(line: str) -> None:
    with _write:
        sys.stdout.buffer.write(line.encode("utf-8", "backslashreplace") + b"\n")
        sys.stdout.buffer.flush()
