"""Scripts that are started with a Python that has none of the packages."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [["settings"], ["profile", "--model", "nowhere"]], ids=" ".join)
def test_a_bare_python_makes_way_for_the_projects_own(tmp_path: Path, command: list[str]) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    name, *options = command
    done = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", ROOT / "scripts" / name, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if (ROOT / ".venv").exists():
        assert "ENGINE_BACKEND" in done.stdout or "nowhere" in done.stderr
    else:
        assert (done.returncode, "./scripts/serve once first" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr
