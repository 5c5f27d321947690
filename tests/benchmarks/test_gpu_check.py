"""kogpt2 gpu-check runs what a GPU would, on the CPU, and finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest

from benchmarks.__main__ import main
from benchmarks.gpu import table as gpu_table
from tests.scripts import command

pytestmark = pytest.mark.slow

GPU_CHECK = ("gpu-check", "--quick", "--workdir")


def test_both_backends_are_right_on_the_cpu_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    done = command.run(*GPU_CHECK, tmp_path, "--device", "cpu", main=main)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("**The CPU in place of a GPU**")
    results = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert results["skipped"] == {}
    for backend, measured in results["backends"].items():
        for name in ("sowol", "dongju"):
            assert measured["accuracy"][name]["same_texts"] == 3
        error = measured["accuracy"]["random"]["relative_logit_error"]
        assert (1e-5 < error < 5e-3) if backend == "onnxruntime" else error < 1e-5
    measured = results["backends"]["onnxruntime"]
    assert measured["exhausted"] == {"refused": True, "same": True}
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
    done = command.run(*GPU_CHECK, tmp_path, main=main)
    assert done.returncode == 1
    assert "mxnet-cu117" in done.stderr
    assert "onnxruntime-gpu" in done.stderr
