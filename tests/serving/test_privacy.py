from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.server import REPOSITORY

CODE = """
import ctypes, os, subprocess, sys
from serving.privacy import PR_SET_DUMPABLE, close_to_others

if os.getuid() == 0:
    os.setuid(54321)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after a program is executed

def readable():
    reader = os.fork()
    if reader == 0:
        try:
            open(f"/proc/{os.getppid()}/environ", "rb").read()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0

before = readable()
close_to_others()
print(before, readable())
subprocess.run(["true"], check=True)  # starting programs still works
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_others_of_the_same_user_cannot_read_the_environment() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["True", "False"]
