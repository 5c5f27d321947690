from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.e2e.server import REPOSITORY

# A Python whose extensions have another suffix finds none that was compiled.
WITHOUT = """
import importlib.machinery, runpy, sys
importlib.machinery.EXTENSION_SUFFIXES.insert(0, ".없음.so")
runpy.run_module("engine", run_name="__main__")
"""


def test_an_engine_without_its_library_ends_the_server_with_the_reason() -> None:
    """With any other status than 2 it would be started again until START_TIMEOUT_S."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=REPOSITORY, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "/engine/native/_pass.없음.so" in line
    assert "./scripts/serve compiles it" in line


BUS_ERROR = """
import faulthandler, mmap, os, sys, tempfile
from engine.native import library
faulthandler.enable()
file = tempfile.TemporaryFile()
file.write(bytes(8192))
file.flush()
mapped = [mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_COPY) for _ in range(2)]
begin = library.ctypes.addressof(library.ctypes.c_char.from_buffer(mapped[0]))
guarded = library.Mapping(begin=begin, size=8192)
library.guard(guarded)
os.truncate(file.fileno(), 0)
print(mapped[0][5000], guarded.lost, flush=True)
if sys.argv[1] == "sent":
    os.kill(os.getpid(), 7)
mapped[1][5000]
"""


@pytest.mark.parametrize("how", ["read", "sent"])
def test_a_bus_error_outside_of_guarded_mappings_still_ends_the_process(how: str) -> None:
    """With the handler that was there before, Python's."""
    command = [sys.executable, "-c", BUS_ERROR, how]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, b"0 1\n")
    assert b"Fatal Python error: Bus error" in done.stderr
