"""Finds the Python that has what a script needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from scripts.client.errors import Problem

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
LOAD_VENV = ROOT / ".venv-load"


def use_project_environment(*needed: str) -> None:
    """Starts the script again with .venv's Python where this one lacks a module.

    Raises `Problem` if that is not there yet.
    """
    if all(map(importlib.util.find_spec, needed)):
        return
    python = VENV / "bin" / "python"
    if not python.exists() or Path(sys.prefix) == VENV:
        raise Problem("run ./scripts/test or ./scripts/serve once first: they make .venv")
    _start_again(python)


def use_load_environment() -> None:
    """Starts the script again with .venv-load's Python; makes that first where it is missing.

    Locust brings gevent and Flask, which the server's environment must not get. Raises `Problem`.
    """
    if Path(sys.prefix) == LOAD_VENV:
        return
    command = f'. "{ROOT}/scripts/setup.sh"; ensure_group "{LOAD_VENV}" load'
    python = VENV / "bin" / "python"
    environment = {**os.environ, "PYTHON": str(python)} if python.exists() else None
    made = subprocess.run(["bash", "-euo", "pipefail", "-c", command], env=environment)
    if made.returncode:
        raise Problem(f"{LOAD_VENV} could not be made, see above")
    _start_again(LOAD_VENV / "bin" / "python")


def _start_again(python: Path) -> None:
    sys.stdout.flush()
    os.execv(python, [str(python), *sys.argv])  # noqa: S606
