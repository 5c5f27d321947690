"""Runs a script with the Python that has what it needs, whichever one it was started with."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from scripts.lib.problem import Problem

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
        raise Problem("packages are missing: run ./scripts/test or ./scripts/serve once first")
    _start_again(python)


def use_load_environment() -> None:
    """Starts the script again with .venv-load's Python; makes that first where it is missing.

    Locust brings gevent and Flask, which the server's environment must not get. Raises `Problem`.
    """
    if Path(sys.prefix) == LOAD_VENV:
        return
    ensure_environment(LOAD_VENV, "load")
    _start_again(LOAD_VENV / "bin" / "python")


def ensure_environment(folder: Path, group: str) -> None:
    """Makes what scripts/setup.sh calls `group`, unless it is there. Raises `Problem`."""
    command = f'. "{ROOT}/scripts/setup.sh"; ensure_group "{folder}" {group}'
    python = VENV / "bin" / "python"
    environment = {**os.environ, "PYTHON": str(python)} if python.exists() else None
    made = subprocess.run(["bash", "-euo", "pipefail", "-c", command], env=environment)
    if made.returncode:
        raise Problem(f"{folder} could not be made, see above")


def _start_again(python: Path) -> None:
    sys.stdout.flush()
    os.execv(python, [str(python), *sys.argv])  # noqa: S606
