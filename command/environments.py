"""Virtual environments beside .venv, for packages that are not installed with the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from command.errors import Failed

ROOT = Path(__file__).resolve().parents[1]
LOAD_VENV = ROOT / ".venv-load"


def use_load_environment() -> None:
    """Restart the command with .venv-load's Python, which has Locust, gevent and Flask."""
    if Path(sys.prefix) == LOAD_VENV:
        return
    ensure_environment(LOAD_VENV, "load")
    sys.stdout.flush()
    python = LOAD_VENV / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    os.execve(python, [str(python), "-m", "scripts.start", *sys.argv[1:]], environment)  # noqa: S606


def ensure_environment(folder: Path, group: str) -> None:
    """Install a dependency group into a virtual environment if it is missing. Raises `Failed`."""
    command = '. "$1/scripts/setup.sh"; ensure_group "$2" "$3"'
    made = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command, "setup", ROOT, folder, group],
        env={**os.environ, "PYTHON": sys.executable},
    )
    if made.returncode:
        raise Failed(f"{folder} could not be installed; the reason is above")
