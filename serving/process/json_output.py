"""Converts lines that this process and its children print to JSON lines.

A slow reader of the log blocks no process, which would then answer no requests. Lines that do not
fit into the queue are dropped and counted in a warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import threading
from collections.abc import Callable

from common.logs import JsonFormatter

FLUSH_S = 0.5  # maximum wait of `close` for queued lines, which delays the server's stop
MAX_QUEUED_BYTES = 4 << 20  # some 16,000 lines: seconds of a busy server's log
MAX_LINE_BYTES = 1 << 20  # a longer line is split
READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 20  # Linux's limit for an unprivileged user


class JsonOutput:
    """Redirects stdout and stderr of this process to the original stdout, as JSON lines.

    Lines that are JSON objects already are not changed. `on_dropped` is called with the number of
    dropped lines, by one thread at a time.
    """

    def __init__(
        self, process: str, on_dropped: Callable[[int], object] = lambda lines: None
    ) -> None:
        self._formatter, self._on_dropped = JsonFormatter(process), on_dropped
        self._queued, self._dropped, self._ended = bytearray(), 0, False
        self._changed = threading.Condition()
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._originals = [os.dup(output) for output in (1, 2)]
        for output in (1, 2):
            os.dup2(writer, output)
        os.close(writer)
        self._pipe, (self._closed, self._close) = reader, os.pipe()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Restores both outputs and writes queued lines, for at most `FLUSH_S`."""
        for original, output in zip(self._originals, (1, 2), strict=True):
            os.dup2(original, output)
        reading, writing = self._threads
        writing.join(FLUSH_S)  # it ends once no process has the pipe open
        os.close(self._close)  # else the pipe is read no further
        reading.join()
        writing.join(FLUSH_S)
        for file in (self._pipe, self._closed):
            os.close(file)

    def write(self, line: bytes) -> None:
        """Queues `line` unchanged."""
        with self._changed:
            if len(self._queued) + len(line) > MAX_QUEUED_BYTES:
                self._dropped += 1
                self._on_dropped(1)
            else:
                self._queued += line
            self._changed.notify()

    def _read(self) -> None:
        read, rest = b"-", b""
        while read:
            ready, _, _ = select.select([self._pipe, self._closed], [], [])
            read = os.read(self._pipe, READ_BYTES) if self._pipe in ready else b""
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                self._add(line + b"\n")
            if not read or len(rest) > MAX_LINE_BYTES:
                self._add(rest)
                rest = b""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _add(self, line: bytes) -> None:
        if line.strip():
            self.write(line if _is_json(line) else self._wrapped(line))

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._ended)
                batch, self._queued = self._queued, bytearray()
                dropped, self._dropped = self._dropped, 0
            if not batch:
                return
            if dropped:
                batch += self._wrapped(
                    b"warning: %d log lines were dropped: what reads the output is too slow"
                    % dropped
                )
            try:
                self._write_all(batch)
            except OSError:  # the reader is gone, or the disk is full
                with self._changed:
                    lines = batch.count(b"\n")
                    self._dropped += dropped + lines
                    self._on_dropped(lines - bool(dropped))

    def _write_all(self, batch: bytearray) -> None:
        left, output = memoryview(batch), self._originals[0]
        while left:
            try:
                left = left[os.write(output, left) :]
            except BlockingIOError:  # another process has made this open file non-blocking
                select.select([], [output], [])

    def _wrapped(self, line: bytes) -> bytes:
        text = line.decode("utf-8", "replace").strip()
        level = logging.WARNING if text.lower().startswith("warn") else logging.INFO
        record = logging.LogRecord("", level, "", 0, text, None, None)
        return self._formatter.format(record).encode() + b"\n"


def _is_json(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
