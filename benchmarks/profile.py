"""`kogpt2 profile`: times the parts of a decode step in the native library."""

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
BEHIND = 16  # tokens in each row before the measured steps
ALL = "all"

Step = dict[str, dict[str, float]]  # "seconds" and "read_bytes", by part


@dataclass(kw_only=True)
class Profile:
    model: Path | None = option(None, "(a random one, kept for kogpt2 bench)", metavar="FOLDER")
    precision: Literal["int8", "fp32"] = option("int8", "of its weights")
    rows: str = option("1,8", "sequences that share a step", metavar="N,...")
    behind: int = option(BEHIND, "tokens behind each of them", metavar="N", min=1)


def run(options: Profile) -> None:
    """Shows where a decode step's time goes in the native library, part by part.

    Medians over 40 steps. `all` has Python's part of a step, too. It also shows how fast each part
    read weights, keys and values, which tells whether memory or arithmetic bounds it.

    Examples:
    kogpt2 profile                               a random model of KoGPT2's full shape, int8
    kogpt2 profile --model my/fine-tune --precision fp32 --rows 1,4
    kogpt2 profile --rows 8 --behind 900         long contexts
    """
    counts = options.rows.split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= 32 for count in counts):
        raise Problem(f"--rows is {options.rows}, must be numbers from 1 to 32 with commas between")
    from command import tables
    from engine.artifacts.open import open_artifact
    from testbed import random_model

    folder = options.model or random_model.make(WORKDIR / "models", random_model.FULL, 0)
    artifact = open_artifact(folder)
    if options.behind > (most := most_behind(artifact)):
        raise Problem(f"--behind is {options.behind}, must be at most {most} with this model")
    steps = measured(artifact, options.precision, [*map(int, counts)], options.behind)
    print(tables.table(*table(steps), markdown=True))


def most_behind(artifact: Artifact) -> int:
    """Return the most tokens of a row after which all steps still fit in its context."""
    return artifact.config.max_length - WARM_UP - STEPS


def weight_bytes(artifact: Artifact, precision: str) -> dict[str, int]:
    """Return the bytes of weights that a decode step reads, by part."""
    from engine.native.prepared import layout

    entries = [e for e in layout(artifact.config, precision) if e.block is not None]
    head = "embedding.weight" if artifact.config.tie_word_embeddings else "head.weight"
    products = sum(e.num_bytes for e in entries if e.name.startswith("layers."))
    return {"products": products, "head": sum(e.num_bytes for e in entries if e.name == head)}


def measured(
    artifact: Artifact, precision: str, counts: Sequence[int], behind: int = BEHIND
) -> dict[str, Step]:
    """Return medians of decode steps for each of `counts` rows of `behind` tokens, by label."""
    import numpy as np

    from engine import backends
    from engine.backends.interface import Piece
    from engine.native import library

    results, weights = {}, weight_bytes(artifact, precision)
    for count in counts:
        draw = np.random.default_rng(1).integers
        ids = draw(5, artifact.config.vocab_size, (count, behind)).tolist()
        model = backends.load(artifact, "native", precision)
        rows = [(model.open_row(), prompt) for prompt in ids]
        for row, prompt in rows:
            model.run([Piece(row, prompt)])
        steps: list[dict[str, float]] = []
        for _ in range(WARM_UP + STEPS):
            library.take_times()
            began = time.perf_counter()
            model.run([Piece(row, prompt[:1]) for row, prompt in rows])
            seconds = time.perf_counter() - began
            steps.append({**library.take_times(), ALL: seconds})
        read: dict[str, float] = {**weights, "attention": model.kv_bytes}
        model.close()
        name = f"{count} row{'s' * (count != 1)}"
        results[name if behind == BEHIND else f"{name}, {behind} tokens behind"] = {
            "seconds": {
                part: statistics.median(step[part] for step in steps[WARM_UP:]) for part in steps[0]
            },
            "read_bytes": {**read, ALL: sum(read.values())},
        }
    return results


def table(steps: Mapping[str, Step]) -> tuple[list[str], list[list[str]]]:
    """Return a table of each part's milliseconds and of its read rate in GB/s."""

    def cells(step: Step, part: str) -> list[str]:
        seconds, read = step["seconds"][part], step["read_bytes"].get(part)
        return [f"{1e3 * seconds:.3f}", f"{read / seconds / 1e9:.0f}" if read and seconds else ""]

    parts = next(iter(steps.values()))["seconds"]
    rows = [
        [part, *(cell for step in steps.values() for cell in cells(step, part))] for part in parts
    ]
    return ["part", *(cell for name in steps for cell in (f"{name}: ms", "GB/s"))], rows
