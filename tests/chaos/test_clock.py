"""The server's clock is set, and nothing but the time of day is another."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.clock import Clock, works

TIMES = "import time; time.sleep(0.01); print(time.time(), time.monotonic())"


def test_a_clock_that_is_set_leaves_what_is_monotonic_alone(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    if not clock.environment:
        assert platform.machine() != "x86_64"  # for which the tests' requirements have it
        pytest.skip("no libfaketime that works")
    for ahead_s in (3600, -3600, 0):
        clock.set(ahead_s)
        begin = time.time(), time.monotonic()
        environment = {**os.environ, **clock.environment}
        said = subprocess.run(
            [sys.executable, "-c", TIMES], env=environment, stdout=subprocess.PIPE, check=True
        )
        at, passed = map(float, said.stdout.split())
        assert begin[0] <= at - ahead_s <= time.time()
        assert begin[1] <= passed <= time.monotonic()


# Java's threads wait so, for a time on the monotonic clock.
WAITS = """
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
print(time.monotonic_ns() >= end)
"""


@pytest.mark.parametrize("ahead_s", [3600, 0, -3600])
def test_who_waits_on_the_monotonic_clock_waits_as_long(tmp_path: Path, ahead_s: int) -> None:
    clock = Clock(tmp_path)
    clock.set(ahead_s)
    environment = {**os.environ, **clock.environment}
    said = subprocess.check_output([sys.executable, "-c", WAITS], env=environment, timeout=60)
    assert said == b"True\n"


def test_a_library_that_cannot_be_loaded_does_not_work(tmp_path: Path) -> None:
    assert works({})
    (tmp_path / "시계.so").write_bytes(b"no library")
    assert not works({"LD_PRELOAD": str(tmp_path / "시계.so")})
