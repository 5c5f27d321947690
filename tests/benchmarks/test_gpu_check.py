"""kogpt2 gpu-check runs what a GPU would, on the CPU, and finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks.__main__ import main
from benchmarks.engine import accuracy
from benchmarks.gpu import table as gpu_table
from engine.backends.interface import BackendModel
from testbed import random_model
from tests.scripts import command

pytestmark = pytest.mark.slow

GPU_CHECK = ("gpu-check", "--quick", "--workdir")


def test_both_backends_are_right_on_the_cpu_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    shown = command.output(command.run(*GPU_CHECK, tmp_path, "--device", "cpu", main=main))
    assert shown.startswith("**The CPU in place of a GPU**")
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


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    file = tmp_path / "없음" / "a.json"
    done = command.run(*GPU_CHECK, tmp_path, "--device", "cpu", "--json", file, main=main)
    assert done.returncode == 2
    assert done.stderr.endswith(f"gpu-check: cannot write {file}: No such file or directory\n")
    assert [*tmp_path.iterdir()] == []


def test_logits_that_are_no_numbers_are_wrong(tmp_path: Path) -> None:
    def load(folder: str) -> BackendModel:
        model = accuracy.int8(folder)
        run = model.run
        model.run = lambda pieces: run(pieces) * np.float32("nan")  # type: ignore[method-assign]
        return model

    folder = str(random_model.make(tmp_path, random_model.TINY, 0))
    prompts = random_model.prompts(random_model.TINY, 1, 8)
    right = accuracy.compare(folder, prompts, 2)
    wrong = accuracy.compare(folder, prompts, 2, load)
    assert np.isnan(wrong["max_logit_error"])
    measured = {"precision": "fp16", "rows": {"max_difference": np.nan, "logits_std": 1.0}}
    of_models = {"random": {**right, "relative_logit_error": 0.0}, "sowol": {**right, **wrong}}
    of_models["sowol"]["same_texts"] = of_models["sowol"]["texts"]
    results = {"backends": {"onnxruntime": {**measured, "accuracy": of_models}}}
    logits, rows = gpu_table.failures(results)
    assert "logits are off by nan" in logits
    assert "a row depends on its batch by nan" in rows


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="it can use a GPU"
)
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    done = command.run(*GPU_CHECK, tmp_path, main=main)
    assert done.returncode == 1
    assert "mxnet-cu117" in done.stderr
    assert "onnxruntime-gpu" in done.stderr
