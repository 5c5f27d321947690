"""Contenders: one classifier by transformers in fp32, and by OpenVINO and onnxruntime in int8.

OpenVINO's is what `optimum-cli export openvino --weight-format int8` makes, onnxruntime's what
`quantize_dynamic` makes of torch's export (weights in int8 before, activations in the run). Run as
a program with a folder and a file, the module writes that export.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.worker import Started

OPSET = 17
Ids = NDArray[np.int64]
Compute = Callable[[Ids], Any]  # ids (B, T) -> logits (B, labels)


def start(path: str, threads: str, kind: str) -> Started:
    compute = {"transformers": _transformers, "openvino": _openvino, "onnxruntime": _onnxruntime}
    logits = compute[kind](Path(path), int(threads))

    def classify(ids: list[list[int]], rows: int) -> list[list[float]]:
        """Return the logits of all texts, computed `rows` at a time."""
        batches = np.split(np.array(ids, np.int64), range(rows, len(ids), rows))
        made: list[list[float]] = np.concatenate([logits(batch) for batch in batches]).tolist()
        return made

    return {}, {"classify": classify}


def _transformers(folder: Path, threads: int) -> Compute:
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.GPT2ForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def logits(ids: Ids) -> Any:
        return model(torch.from_numpy(ids), use_cache=False).logits.numpy()

    computed: Compute = logits
    return computed


def _openvino(folder: Path, threads: int) -> Compute:
    import openvino

    how = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", how)
    request = model.create_infer_request()

    def logits(ids: Ids) -> Any:
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        return request.infer(given)["logits"].copy()

    return logits


def _onnxruntime(file: Path, threads: int) -> Compute:
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantized = file.with_suffix(".int8")
    if not quantized.exists():
        building = file.with_suffix(".building")
        quantize_dynamic(file, building, weight_type=QuantType.QInt8)
        building.rename(quantized)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(quantized, options, providers=["CPUExecutionProvider"])

    def logits(ids: Ids) -> Any:
        return session.run(None, {"ids": ids, "mask": np.ones_like(ids)})[0]

    return logits


def export_onnx(folder: Path, file: Path) -> None:
    import torch
    import transformers

    load = transformers.GPT2ForSequenceClassification.from_pretrained

    class Classifier(torch.nn.Module):  # type: ignore[misc]
        """The model without the arguments and results of a generation."""

        def __init__(self) -> None:
            super().__init__()
            self.model = load(folder, attn_implementation="eager").eval()

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    ids = torch.arange(4, 16).reshape(2, 6)
    torch.onnx.export(
        Classifier(),
        (ids, torch.ones_like(ids)),
        file,
        input_names=["ids", "mask"],
        output_names=["logits"],
        dynamic_axes={"ids": {0: "B", 1: "T"}, "mask": {0: "B", 1: "T"}, "logits": {0: "B"}},
        opset_version=OPSET,
        dynamo=False,  # torch's other exporter needs a package more
    )


if __name__ == "__main__":
    export_onnx(*map(Path, sys.argv[1:]))
