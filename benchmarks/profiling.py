"""Where a decode step's time goes inside onnxruntime, operator by operator: kogpt2 profile."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.artifacts.artifact import Artifact
from engine.backends.onnx.cpu import OnnxModel
from engine.backends.onnx.frames import Frame
from engine.prepared.cache import prepared

STEPS = 40
WARM_UP = 5
PROMPT = 16
BYTES_PER_WEIGHT = {"int8": 1 + 4 / 64, "fp32": 4.0}  # int8 has a scale for 64 weights
PRODUCTS = ("MatMulNBits", "FusedMatMul")

Event = dict[str, Any]
Step = dict[str, float]  # seconds by operator


def measure(artifact: Artifact, precision: str, rows: int) -> list[Step]:
    """onnxruntime's own times of `STEPS` decode steps of `rows` rows, one dictionary a step."""
    ids = np.random.default_rng(1).integers(5, artifact.config.vocab_size, (rows, PROMPT))
    with tempfile.TemporaryDirectory() as out, prepared(artifact, precision, None) as found:
        frame = Frame(found.frame, found.pieces, Path(out) / "profile")
        model = OnnxModel(artifact.config, found, frame)
        for row in range(rows):
            model.add_row()
            model.extend(row, ids[row])
        for _ in range(WARM_UP + STEPS):
            model.decode(ids[:, 0])
        text = Path(frame.session.end_profiling()).read_text(encoding="utf-8")
        model.close()
    nodes = [event for event in json.loads(text) if event["cat"] == "Node"]
    runs = rows + WARM_UP + STEPS
    per_run = len(nodes) // runs
    return [_step(nodes[i * per_run : (i + 1) * per_run]) for i in range(runs - STEPS, runs)]


def _step(events: Sequence[Event]) -> Step:
    step: Step = defaultdict(float)
    for event in events:
        step[_name(event)] += event["dur"] / 1e6
    return step


def _name(event: Event) -> str:
    """The operator; of a product also its matrix, as in `MatMulNBits 3072x768`."""
    kind: str = event["args"]["op_name"]
    if kind not in PRODUCTS:
        return kind
    wide, outer = _shape(event, "input_type_shape")[-1], _shape(event, "output_type_shape")[-1]
    return f"{kind} {outer}x{wide}"


def _shape(event: Event, which: str) -> list[int]:
    shape: list[int] = next(iter(event["args"][which][0].values()))
    return shape


def table(artifact: Artifact, precision: str, rows: Sequence[int]) -> Iterator[str]:
    """Lines of Markdown: milliseconds a step, and of products the weights read and the arithmetic
    done in that time."""
    yield (
        "| operator | "
        + " | ".join(f"{n} row{'s'[: n > 1]}: ms | GB/s | GMAC/s" for n in rows)
        + " |"
    )
    yield "|---" * (1 + 3 * len(rows)) + "|"
    measured = [measure(artifact, precision, n) for n in rows]
    medians = [
        {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        for steps in measured
    ]
    for name in sorted(medians[0], key=lambda name: -medians[0][name]):
        cells = [
            _cells(name, m.get(name, 0.0), n, precision, artifact)
            for m, n in zip(medians, rows, strict=True)
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"
    sums = [1e3 * statistics.median(sum(step.values()) for step in steps) for steps in measured]
    yield "| all | " + " | ".join(f"{ms:.3f} |  | " for ms in sums) + " |"


def _cells(name: str, seconds: float, rows: int, precision: str, artifact: Artifact) -> str:
    if not seconds:
        return " |  | "
    _, _, matrix = name.partition(" ")
    if not matrix:
        return f"{1e3 * seconds:.3f} |  | "
    outer, wide = map(int, matrix.split("x"))
    count = 1 if outer == artifact.config.vocab_size else artifact.config.num_layers
    weights = outer * wide * count
    gigabytes = weights * BYTES_PER_WEIGHT[precision] / seconds / 1e9
    return f"{1e3 * seconds:.3f} | {gigabytes:.0f} | {weights * rows / seconds / 1e9:.0f}"
