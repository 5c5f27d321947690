"""Where a pass's time goes, part by part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
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
    from command import tables
    from engine.artifacts.open import open_artifact
    from testbed import random_model

    folder = options.model or random_model.make(WORKDIR / "models", random_model.FULL, 0)
    artifact = open_artifact(folder)
    results = measured(artifact, options.precision, [*map(int, counts)])
    read_bytes = weight_bytes(artifact, options.precision)
    print(tables.table(*table(results, read_bytes), markdown=True))


def weight_bytes(artifact: Artifact, precision: str) -> dict[str, int]:
    """Bytes of weights that a step reads, by part."""
    from engine.native.prepared import layout

    entries = [e for e in layout(artifact.config, precision) if e.block is not None]
    head = "embedding.weight" if artifact.config.tie_word_embeddings else "head.weight"
    products = sum(e.num_bytes for e in entries if e.name.startswith("layers."))
    return {"products": products, "head": sum(e.num_bytes for e in entries if e.name == head)}


def measured(artifact: Artifact, precision: str, counts: Sequence[int]) -> dict[str, Step]:
    """By the number of rows, median seconds of each part, and of `ALL` of a step."""
    import numpy as np

    from engine import backends
    from engine.backends.interface import Piece
    from engine.native import library

    results = {}
    for count in counts:
        draw = np.random.default_rng(1).integers
        ids = draw(5, artifact.config.vocab_size, (count, PROMPT)).tolist()
        model = backends.load(artifact, "native", precision)
        rows = [(model.open_row(), prompt) for prompt in ids]
        for row, prompt in rows:
            model.run([Piece(row, prompt)])
        steps: list[Step] = []
        for _ in range(WARM_UP + STEPS):
            library.take_times()
            began = time.perf_counter()
            model.run([Piece(row, prompt[:1]) for row, prompt in rows])
            seconds = time.perf_counter() - began
            steps.append({**library.take_times(), ALL: seconds})
        model.close()
        results[str(count)] = {
            part: statistics.median(step[part] for step in steps[WARM_UP:]) for part in steps[0]
        }
    return results


def table(
    results: Mapping[str, Step], read_bytes: Mapping[str, int]
) -> tuple[list[str], list[list[str]]]:
    """Milliseconds a step, and how fast the weights of products were read."""

    def cells(part: str, seconds: float) -> list[str]:
        read = f"{read_bytes[part] / seconds / 1e9:.0f}" if part in read_bytes and seconds else ""
        return [f"{1e3 * seconds:.3f}", read]

    parts = next(iter(results.values()))
    rows = [
        [part, *(c for step in results.values() for c in cells(part, step[part]))] for part in parts
    ]
    heads = [(f"{n} row{'s' * (n != '1')}: ms", "GB/s") for n in results]
    return ["part", *(cell for head in heads for cell in head)], rows
