"""onnxruntime reports nothing: where it does, it keeps an id of the machine in the home folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.processes import python

# Any of these would keep it quiet, too.
QUIET = ("ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI")


@pytest.mark.parametrize("module", ["common.onnx_session", "scripts.artifacts.conversion"])
def test_onnxruntime_reports_nothing(tmp_path: Path, module: str) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in QUIET and not k.startswith("XDG_")}
    code = f"import {module}, onnxruntime, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    done = python("-c", code, env={**kept, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert not list(tmp_path.rglob("*deviceid*"))
