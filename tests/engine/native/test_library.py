from __future__ import annotations

import subprocess
import sys

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
