"""The server's clock is set; only the time of day changes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.clock import Clock, works

# Prints the times, after a wait for a time on the monotonic clock as Java's threads do it.
TIMES = """
import ctypes, time
libc, timespec = ctypes.CDLL(None), ctypes.c_long * 2
condition, mutex, kind = (ctypes.create_string_buffer(64) for _ in range(3))
libc.pthread_condattr_init(kind)
libc.pthread_condattr_setclock(kind, time.CLOCK_MONOTONIC)
libc.pthread_cond_init(condition, kind)
libc.pthread_mutex_init(mutex, None)
libc.pthread_mutex_lock(mutex)
end = time.monotonic_ns() + 50_000_000
libc.pthread_cond_timedwait(condition, mutex, timespec(*divmod(end, 1_000_000_000)))
print(time.time(), time.monotonic(), time.monotonic_ns() >= end)
"""


@pytest.mark.parametrize("ahead_s", [3600, -3600, 0])
def test_a_clock_that_is_set_leaves_the_monotonic_clock_alone(tmp_path: Path, ahead_s: int) -> None:
    clock = Clock(tmp_path)
    if not clock.environment:
        assert platform.machine() != "x86_64"  # for which the tests' requirements have it
        pytest.skip("no libfaketime that works")
    clock.set(ahead_s)
    begin, environment = (time.time(), time.monotonic()), {**os.environ, **clock.environment}
    output = subprocess.check_output([sys.executable, "-c", TIMES], env=environment, timeout=60)
    at, passed, waited = output.decode().split()
    assert begin[0] <= float(at) - ahead_s <= time.time()
    assert begin[1] <= float(passed) <= time.monotonic()
    assert waited == "True"


def test_a_library_that_cannot_be_loaded_does_not_work(tmp_path: Path) -> None:
    (tmp_path / "시계.so").write_bytes(b"no library")
    assert works({})
    assert not works({"LD_PRELOAD": str(tmp_path / "시계.so")})
