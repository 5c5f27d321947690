"""`kogpt2 profile`: times the parts of decode steps and of prompts in the native library."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.process import WORKDIR
from command.errors import Problem
from command.options import option

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact

STEPS = 40
PROMPTS = 10
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
    prompt: int | None = option(
        None, "a prompt of so many tokens, in place of decode steps", metavar="N", min=1
    )


def run(options: Profile) -> None:
    """Show where the time of a decode step, or of a prompt, goes in the native library.

    Medians over 40 steps, or 10 prompts; `all` has Python's part, too. For steps it also shows how
    fast each part read weights, keys and values: does memory bound it, or arithmetic?

    Examples:
    kogpt2 profile                               a random model of KoGPT2's full shape, int8
    kogpt2 profile --model my/fine-tune --precision fp32 --rows 1,4
    kogpt2 profile --rows 8 --behind 900         long contexts
    kogpt2 profile --prompt 1000                 a long prompt
    """
    counts = options.rows.split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= 32 for count in counts):
        raise Problem(f"--rows is {options.rows}, must be numbers from 1 to 32 with commas between")
    from command import tables
    from engine.artifacts.open import open_artifact
    from testbed import random_model

    if options.model is not None and not options.model.is_dir():
        raise Problem(f"there is no folder {options.model}")
    folder = options.model or random_model.make(WORKDIR / "models", random_model.FULL, 0)
    artifact = open_artifact(folder)
    if options.prompt is not None:
        if options.prompt > (most := artifact.config.max_length):
            raise Problem(f"--prompt is {options.prompt}, must be at most {most} with this model")
        steps = measured_prompt(artifact, options.precision, options.prompt)
    else:
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

    entries = [e for e in layout(artifact.config, precision) if e.precision is not None]
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

    results, weights = {}, weight_bytes(artifact, precision)
    for count in counts:
        draw = np.random.default_rng(1).integers
        ids = draw(5, artifact.config.vocab_size, (count, behind)).tolist()
        model = backends.load(artifact, "native", precision)
        rows = [(model.open_row(), prompt) for prompt in ids]
        for row, prompt in rows:
            model.run([Piece(row, prompt)])
        step = [Piece(row, prompt[:1]) for row, prompt in rows]
        seconds = medians(partial(model.run, step), STEPS)
        read: dict[str, float] = {**weights, "attention": model.kv_bytes}
        model.close()
        name = f"{count} row{'s' * (count != 1)}"
        results[name if behind == BEHIND else f"{name}, {behind} tokens behind"] = {
            "seconds": seconds,
            "read_bytes": {**read, ALL: sum(read.values())},
        }
    return results


def measured_prompt(artifact: Artifact, precision: str, tokens: int) -> dict[str, Step]:
    """Return medians of prompts of so many tokens, in passes as the engine computes them."""
    import numpy as np

    from engine import backends
    from engine.backends.interface import Piece
    from engine.step_loop import PREFILL_TOKENS_ALONE

    ids = np.random.default_rng(1).integers(5, artifact.config.vocab_size, tokens).tolist()
    model = backends.load(artifact, "native", precision)

    def prefill() -> None:
        row = model.open_row()
        for first in range(0, tokens, PREFILL_TOKENS_ALONE):
            piece = ids[first : first + PREFILL_TOKENS_ALONE]
            is_last = first + PREFILL_TOKENS_ALONE >= tokens
            model.run([Piece(row, piece, num_logits=int(is_last))])
        model.close_row(row)

    seconds = medians(prefill, PROMPTS)
    model.close()
    return {f"a prompt of {tokens} tokens": {"seconds": seconds, "read_bytes": {}}}


def medians(compute: Callable[[], object], count: int) -> dict[str, float]:
    """Return the medians of the seconds that `compute` takes, by part, after `WARM_UP` calls."""
    from engine.native import library

    taken: list[dict[str, float]] = []
    for _ in range(WARM_UP + count):
        library.take_times()
        began = time.perf_counter()
        compute()
        seconds = time.perf_counter() - began
        taken.append({**library.take_times(), ALL: seconds})
    return {part: statistics.median(times[part] for times in taken[WARM_UP:]) for part in taken[0]}


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
