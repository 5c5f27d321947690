"""onnxruntime reports nothing: where it does, it keeps an id of the machine in the home folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import onnx_session
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


@pytest.mark.parametrize(
    ("version", "checked"),
    [("1.9.0", True), ("1.23.2", True), ("1.24.1", False), ("1.100.0", False), ("2.0.0", False)],
)
def test_versions_that_do_not_check_external_tensors_are_known_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, checked: bool
) -> None:
    path = tmp_path / "봄.onnx"
    calls: list[Path] = []
    monkeypatch.setattr(onnx_session, "VERSION", version)
    monkeypatch.setattr(onnx_session, "_check_places", calls.append)
    with pytest.raises(Exception, match=r"봄\.onnx"):  # no such file
        onnx_session.open_graph(path)
    assert calls == ([path] if checked else [])
