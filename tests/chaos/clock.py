"""A clock of the server that can be set: libfaketime, preloaded into its processes.

Only the time of day changes; monotonic clocks and the times of files do not. The library is that of
the wheel in the tests' requirements:
Debian's 0.9.10 breaks `time.sleep` of Python 3.11 (https://github.com/wolfcw/libfaketime/issues/426).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

IN_WHEEL = "vendor/libfaketime/src/libfaketime.so.1"
SLEEPS = "import time; time.sleep(0.001)"


class Clock:
    """`environment` is for the server; empty without a library that works."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.set(0)
        found = {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Otherwise waits on a monotonic clock end at once, and Java's threads spin.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "NO_FAKE_STAT": "1",
            "WORKER_VARIABLES": "FAKETIME_*,NO_FAKE_STAT",
        }
        self.environment = found if works(found) else {}

    def set(self, ahead_s: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}s\n", encoding="ascii")
        new.replace(self._file)


def library() -> Path:
    wheel = importlib.util.find_spec("libfaketime")
    return Path(wheel.origin or "").parent / IN_WHEEL if wheel else Path(IN_WHEEL)


def works(environment: Mapping[str, str]) -> bool:
    """Whether Python can sleep with a clock that is an hour ahead."""
    shifted = {k: v for k, v in environment.items() if k != "FAKETIME_TIMESTAMP_FILE"}
    done = subprocess.run(
        [sys.executable, "-c", SLEEPS],
        env={**os.environ, **shifted, "FAKETIME": "+3600s"},
        capture_output=True,
    )
    return not done.returncode and not done.stderr
