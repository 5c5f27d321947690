"""Makes a JSON line of every line that this process and those that it starts print."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable
from typing import IO

from common.logs import JsonFormatter

FLUSH_S = 1.0


class JsonOutput:
    """From now on, both outputs lead through here to what was stdout. Lines that are JSON objects
    already stay as they are."""

    def __init__(self, process: str) -> None:
        self._formatter = JsonFormatter(process)
        reader, writer = os.pipe()
        stdout = os.fdopen(os.dup(1), "wb", buffering=0)
        for output in (1, 2):
            os.dup2(writer, output)
        os.close(writer)
        lines = os.fdopen(reader, "rb")
        self._thread = threading.Thread(target=self._copy, args=(lines, stdout), daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Before this process ends at once: what was printed by then gets out."""
        for output in (1, 2):
            os.close(output)
        self._thread.join(FLUSH_S)  # until a process that still runs ends, but not longer

    def _copy(self, lines: Iterable[bytes], stdout: IO[bytes]) -> None:
        for line in lines:
            if line.strip():
                stdout.write(line if _is_json(line) else self._wrapped(line))

    def _wrapped(self, line: bytes) -> bytes:
        text = line.decode("utf-8", "replace").strip()
        level = logging.WARNING if text.lower().startswith("warn") else logging.INFO
        record = logging.LogRecord("", level, "", 0, text, None, None)
        return self._formatter.format(record).encode() + b"\n"


def _is_json(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False
