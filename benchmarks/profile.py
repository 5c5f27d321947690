"""Where a pass's time goes, part by part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.process import WORKDIR
from command.errors import Problem
from command.options import option

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact

STEPS = 40
WARM_UP = 5
PROMPT = 16
ALL = "all"

Step = dict[str, float]  # seconds by part


@dataclass(kw_only=True)
class Profile:
    model: Path | None = option(None, "(a random one, kept for kogpt2 bench)", metavar="FOLDER")
    precision: Literal["int8", "fp32"] = option("int8", "of its weights")
    rows: str = option("1,8", "sequences that share a step", metavar="N,...")


def run(options: Profile) -> None:
    """Shows where a decode step's time goes in the native library, part by part.

    Medians over 40 steps. `all` has Python's part of a step, too. Of the products it also shows how
    fast their weights were read, which tells whether memory or arithmetic bounds them.

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
    results = measured(artifact, options.precision, [*map(int, counts)])
    print(*lines(results, weight_bytes(artifact, options.precision)), sep="\n")


def weight_bytes(artifact: Artifact, precision: str) -> dict[str, int]:
    """Bytes of weights that a step reads, by part."""
    from engine.native.prepared import layout

    entries = [e for e in layout(artifact.config, precision) if e.block is not None]
    head = "embedding.weight" if artifact.config.tie_word_embeddings else "head.weight"
    products = sum(e.num_bytes for e in entries if e.name.startswith("layers."))
    return {"products": products, "head": sum(e.num_bytes for e in entries if e.name == head)}


def measure(artifact: Artifact, precision: str, rows: int) -> list[Step]:
    """`STEPS` decode steps of `rows` rows, one dictionary a step."""
    import numpy as np

    from engine import backends
    from engine.backends.interface import Piece
    from engine.native import library

    ids = np.random.default_rng(1).integers(5, artifact.config.vocab_size, (rows, PROMPT)).tolist()
    model = backends.load(artifact, "native", precision)
    opened = [model.open_row() for _ in range(rows)]
    for row, prompt in zip(opened, ids, strict=True):
        model.run([Piece(row, prompt)])
    steps = []
    for _ in range(WARM_UP + STEPS):
        library.take_times()
        began = time.perf_counter()
        model.run([Piece(row, prompt[:1]) for row, prompt in zip(opened, ids, strict=True)])
        seconds = time.perf_counter() - began
        steps.append({**library.take_times(), ALL: seconds})
    model.close()
    return steps[WARM_UP:]


def measured(artifact: Artifact, precision: str, counts: Sequence[int]) -> dict[str, Step]:
    """By the number of rows, median seconds of each part, and of `ALL` of a step."""
    results = {}
    for rows in counts:
        steps = measure(artifact, precision, rows)
        results[str(rows)] = {part: statistics.median(s[part] for s in steps) for part in steps[0]}
    return results


def lines(results: Mapping[str, Step], read_bytes: Mapping[str, int]) -> Iterator[str]:
    """Milliseconds a step, and how fast the weights of products were read."""
    from benchmarks.report.tables import table

    def cells(part: str, seconds: float) -> list[str]:
        read = f"{read_bytes[part] / seconds / 1e9:.0f}" if part in read_bytes and seconds else ""
        return [f"{1e3 * seconds:.3f}", read]

    parts = next(iter(results.values()))
    rows = [
        [part, *(c for step in results.values() for c in cells(part, step[part]))] for part in parts
    ]
    heads = [(f"{n} row{'s' * (n != '1')}: ms", "GB/s") for n in results]
    return table(["part", *(cell for head in heads for cell in head)], rows)
