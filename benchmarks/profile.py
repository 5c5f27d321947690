"""Where a decode step's time goes inside onnxruntime, operator by operator."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.bench import WORKDIR
from scripts.lib.problem import Problem
from scripts.options import option

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact

STEPS = 40
WARM_UP = 5
PROMPT = 16
BYTES_PER_WEIGHT = {"int8": 1 + 8 / 64, "fp32": 4.0}  # 64 in int8 have a scale and an offset
ALL = "all"
PRODUCTS = ("Int8MatMul", "FusedMatMul")

Event = dict[str, Any]
Step = dict[str, float]  # seconds by operator


@dataclass(kw_only=True)
class Profile:
    model: Path | None = option(None, "(a random one, kept for kogpt2 bench)", metavar="FOLDER")
    precision: Literal["int8", "fp32"] = option("int8", "of its weights")
    rows: str = option("1,8", "sequences that share a step", metavar="N,...")


def run(options: Profile) -> None:
    """Shows where a decode step's time goes inside onnxruntime, operator by operator.

    The times are those of onnxruntime's own profiler, medians over 40 steps. Of a matrix product it
    also shows how fast its weights were read and how much was multiplied meanwhile, which tells
    whether memory or arithmetic bounds it.

    Examples:
    kogpt2 profile                               a random model of KoGPT2's full shape, int8
    kogpt2 profile --model my/fine-tune --precision fp32 --rows 1,4
    """
    counts = options.rows.split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= 32 for count in counts):
        raise Problem(f"--rows is {options.rows}, must be numbers from 1 to 32 with commas between")
    from benchmarks import random_model
    from engine.artifacts.open import open_artifact

    folder = options.model or random_model.make(WORKDIR / "models", random_model.FULL, 0)
    artifact = open_artifact(folder)
    found = measured(artifact, options.precision, [*map(int, counts)])
    config = dataclasses.asdict(artifact.config)
    print(*lines(found, config, options.precision), sep="\n")


def measure(artifact: Artifact, precision: str, rows: int) -> list[Step]:
    """onnxruntime's own times of `STEPS` decode steps of `rows` rows, one dictionary a step."""
    import numpy as np

    from engine.backends.onnx.cpu import OnnxModel
    from engine.backends.onnx.frames import Frame
    from engine.prepared.cache import prepared

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
    """The operator; of a product also its matrix, as in `Int8MatMul 3072x768`."""
    kind: str = event["args"]["op_name"]
    if kind not in PRODUCTS:
        return kind
    wide, outer = _shape(event, "input_type_shape")[-1], _shape(event, "output_type_shape")[-1]
    return f"{kind} {outer}x{wide}"


def _shape(event: Event, which: str) -> list[int]:
    shape: list[int] = next(iter(event["args"][which][0].values()))
    return shape


def measured(artifact: Artifact, precision: str, counts: Sequence[int]) -> dict[str, Step]:
    """By the number of rows, median seconds of each operator, and of `ALL` of them."""
    from benchmarks.report.tables import medians

    found = {}
    for rows in counts:
        steps = measure(artifact, precision, rows)
        found[str(rows)] = {
            **medians(steps),
            ALL: statistics.median(sum(s.values()) for s in steps),
        }
    return found


def lines(found: Mapping[str, Step], config: Mapping[str, Any], precision: str) -> Iterator[str]:
    """Milliseconds a step, and of products the weights read and the arithmetic done meanwhile."""
    from benchmarks.report.tables import table

    def cells(name: str, seconds: float, rows: int) -> list[str]:
        _, _, matrix = name.partition(" ")
        if not matrix or not seconds:
            return [f"{1e3 * seconds:.3f}" if seconds else "", "", ""]
        outer, wide = map(int, matrix.split("x"))
        times = 1 if outer == config["vocab_size"] else config["num_layers"]
        per_s = outer * wide * times / seconds / 1e9
        read = per_s * BYTES_PER_WEIGHT[precision]
        return [f"{1e3 * seconds:.3f}", f"{read:.0f}", f"{per_s * rows:.0f}"]

    first = next(iter(found.values()))
    names = sorted(first, key=first.__getitem__, reverse=True)
    rows = [
        [
            name,
            *(cell for n, one in found.items() for cell in cells(name, one.get(name, 0.0), int(n))),
        ]
        for name in [*(name for name in names if name != ALL), ALL]
    ]
    heads = [(f"{n} row{'s' * (n != '1')}: ms", "GB/s", "GMAC/s") for n in found]
    return table(["operator", *(cell for head in heads for cell in head)], rows)
