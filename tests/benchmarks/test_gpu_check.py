"""kogpt2 gpu-check runs what a GPU would, on the CPU, and finds what is wrong."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from benchmarks.__main__ import main
from benchmarks.gpu import table as gpu_table
from testbed.process import ROOT
from tests.scripts import command

pytestmark = pytest.mark.slow

GPU_CHECK = ("gpu-check", "--quick", "--workdir")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("gpu_check")
    result = command.run(*GPU_CHECK, folder, "--device", "cpu", main=main)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "gpu_check.json").read_text(encoding="utf-8")), result.stdout


def test_both_backends_are_right_on_the_cpu(checked: tuple[dict[str, Any], str]) -> None:
    results, _ = checked
    assert results["skipped"] == {}
    assert list(gpu_table.failures(results)) == []
    for backend, measured in results["backends"].items():
        for name in ("sowol", "dongju"):
            assert measured["accuracy"][name]["same_texts"] == 3
        assert len(measured["loads"]) == results["plan"]["models"]
        assert measured["turns_tokens_per_s"] > 0
        error = measured["accuracy"]["random"]["relative_logit_error"]
        assert (1e-5 < error < 5e-3) if backend == "onnxruntime" else error < 1e-5
    assert results["backends"]["onnxruntime"]["exhausted"] == {"refused": True, "same": True}


def test_the_table_is_markdown_that_says_it_was_the_cpu(
    checked: tuple[dict[str, Any], str],
) -> None:
    _, output = checked
    assert output.startswith("**The CPU in place of a GPU**")
    rows = [line for line in output.splitlines() if line.startswith("|")]
    assert len(rows) == 13
    assert {row.count("|") for row in rows} == {4}


def test_what_is_wrong_is_said(checked: tuple[dict[str, Any], str]) -> None:
    results = copy.deepcopy(checked[0])
    measured = results["backends"]["onnxruntime"]
    measured["accuracy"]["dongju"]["relative_logit_error"] = 0.02
    measured["accuracy"]["sowol"]["same_texts"] = 2
    measured["rows"]["max_difference"] = 1.0
    measured["exhausted"]["refused"] = False
    text = "\n".join(gpu_table.failures(results))
    for part in ("off by 2.0e-02", "2 of 3 texts of sowol", "depends on its batch", "not refused"):
        assert part in text
    assert "mxnet" not in text


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="it can use a GPU"
)
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "scripts.cli", *GPU_CHECK, tmp_path]
    result = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert result.returncode == 1
    assert "mxnet-cu117" in result.stderr
    assert "onnxruntime-gpu" in result.stderr
    assert "Traceback" not in result.stderr
