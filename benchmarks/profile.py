"""Where a decode step's time goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.bench import WORKDIR
from scripts.lib.problem import Problem
from scripts.options import option


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
    from benchmarks import profiling, random_model
    from engine.artifacts.open import open_artifact

    folder = options.model or random_model.make(WORKDIR / "models", random_model.FULL, 0)
    for line in profiling.table(open_artifact(folder), options.precision, [*map(int, counts)]):
        print(line)
