"""Copies a script's output to the worker's log, at a limited rate.

Multi Model Server reads a worker's output line by line into memory, so unlimited output or an
endless line would use up the server's memory. Output above the limits is dropped.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import IO

MAX_LINE_BYTES = 8192  # longer lines are split
# A token bucket: its size, and the rate at which it refills. Larger values drop less output of a
# busy script, and fill the log faster.
BURST_BYTES = 1 << 20
BYTES_PER_S = 64 << 10

_write = threading.Lock()


def print_anything() -> None:
    """Makes `print` write lone surrogates as escapes: as UTF-8 they would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def relay(stream: IO[bytes], name: str) -> None:
    """Copies the lines of `stream` to stdout in a thread, prefixed with the model's `name`."""
    thread = threading.Thread(target=_relay, args=(stream, name), name="output", daemon=True)
    thread.start()


def _relay(stream: IO[bytes], name: str) -> None:
    budget, dropped, last = float(BURST_BYTES), 0, time.monotonic()
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            now = time.monotonic()
            budget, last = min(budget + (now - last) * BYTES_PER_S, BURST_BYTES), now
            if len(line) > budget:
                dropped += len(line)
                continue
            budget -= len(line)
            if dropped:
                _print_dropped(name, dropped)
                dropped = 0
            text = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
            if text:
                _print(f"{name}: {text}")
    if dropped:
        _print_dropped(name, dropped)


def _print_dropped(name: str, num_bytes: int) -> None:
    _print(f"{name}: {num_bytes} bytes of output were dropped, the limit is {BYTES_PER_S} a second")


def _print(line: str) -> None:
    with _write:
        sys.stdout.buffer.write(line.encode("utf-8", "backslashreplace") + b"\n")
        sys.stdout.buffer.flush()
