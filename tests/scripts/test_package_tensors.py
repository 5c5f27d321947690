"""kogpt2 package loads a model of tensors, as its worker would."""

from __future__ import annotations

from pathlib import Path

import pytest

from command.errors import Problem
from scripts.artifacts.archive import check
from tests.handlers.tensors.graphs import TinyGPT2, classifier


def test_what_goes_in_and_out_is_shown(tmp_path: Path) -> None:
    TinyGPT2().save(tmp_path / "gpt2" / "1" / "model.onnx")
    assert check(tmp_path / "gpt2").summary == (
        "onnxruntime_onnx, input_ids INT64 [-1, -1], attention_mask INT64 [-1, -1]"
        " -> logits FP32 [-1, -1, 40]"
    )
    classifier(tmp_path / "images")
    assert check(tmp_path / "images").summary == (
        "mxnet_symbol, data FP32 [-1, 3, 16, 16] -> softmax_output FP32 [-1, 5]"
    )


def test_what_the_server_would_refuse_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(Problem, match=r"cannot be served: model.onnx cannot be loaded"):
        check(tmp_path)
