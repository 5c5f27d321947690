"""Runs the oracle: transformers and PEFT, in an environment made from requirements/oracle.txt.

ORACLE_PYTHON=.venv-oracle/bin/python .venv/bin/python -m pytest -m oracle tests/oracle
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


def python() -> str:
    interpreter = os.environ.get("ORACLE_PYTHON")
    if not interpreter:
        pytest.fail("ORACLE_PYTHON must name the Python of the oracle; .ci/run sets it")
    return str(Path(interpreter).absolute())


def run(*arguments: str | Path, stdin: str = "") -> str:
    """Run the oracle's Python with these arguments and return its output."""
    done = subprocess.run(
        [python(), *arguments],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
