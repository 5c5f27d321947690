"""Measures steps and prompts of deltas of one base beside those of whole models."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.report import tables as report
from benchmarks.report.tables import Results, Row
from benchmarks.run import in_turns, seconds_of
from benchmarks.steps import decode_step, filled
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from engine.backends.interface import Adapter, Piece
from engine.native.delta import open_delta
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from testbed import random_model

ROWS = 8
PROMPT_TOKENS = 1000
ONE, ONE_DELTA = "one row", "one row of a delta"
OF_ONE, DELTAS, TURNS = "8 rows of one model", "8 rows of 8 deltas", "8 whole models in turns"
OF_ONE_DELTA = "8 rows of one delta"
PROMPT, PROMPT_OF_DELTA = "a prompt", "a prompt of a delta"


def measure(workdir: Path, config: GPT2Config, rounds: int) -> Results:
    """Return seconds by kind of step, and the bytes of deltas and of whole models."""
    store, cache = workdir / "random", workdir / "prepared"
    base = random_model.make(store, config, 0)
    paths = [*random_model.fine_tunes_of(base, store, config, ROWS)]
    with ExitStack() as opened:

        def open_model(path: Path) -> NativeModel:
            model = NativeModel(prepared(open_artifact(path), "int8", cache))
            return opened.enter_context(closing(model))

        model, wholes = open_model(base), [open_model(path) for path in paths]
        deltas = [open_delta(open_artifact(path), open_artifact(base), cache) for path in paths]
        adapters = [opened.enter_context(closing(delta.load())) for delta in deltas]
        rows = [filled(model) for _ in range(ROWS)]
        of_deltas = [filled(model, adapter) for adapter in adapters]
        of_one_delta = [filled(model, adapters[0]) for _ in range(ROWS)]
        of_wholes = [filled(whole) for whole in wholes]

        def in_turn() -> None:
            for whole, row in zip(wholes, of_wholes, strict=True):
                decode_step(whole, [row], [None])

        prompt = np.arange(min(PROMPT_TOKENS, config.max_length)) % config.vocab_size
        steps: dict[str, Callable[[], None]] = {
            ONE: partial(decode_step, model, rows[:1], [None]),
            ONE_DELTA: partial(decode_step, model, of_deltas[:1], adapters[:1]),
            OF_ONE: partial(decode_step, model, rows, [None] * ROWS),
            DELTAS: partial(decode_step, model, of_deltas, adapters),
            OF_ONE_DELTA: partial(decode_step, model, of_one_delta, adapters[:1] * ROWS),
            TURNS: in_turn,
            PROMPT: partial(_read, model, prompt.tolist(), None),
            PROMPT_OF_DELTA: partial(_read, model, prompt.tolist(), adapters[0]),
        }
        timed = {kind: partial(seconds_of, step) for kind, step in steps.items()}
        return {
            "seconds": in_turns(timed, rounds),
            "delta_bytes": [delta.num_bytes for delta in deltas],
            "whole_bytes": model.weight_bytes,
        }


def _read(model: NativeModel, prompt: list[int], adapter: Adapter | None) -> None:
    row = model.open_row()
    model.run([Piece(row, prompt, 1, adapter)])
    model.close_row(row)


def _ratio(one: str, other: str) -> Callable[[Results], list[float]]:
    """Return a function of results that gives the ratio of two kinds' seconds, by round."""

    def ratios(results: Results) -> list[float]:
        seconds = results["speeds"]["seconds"]
        return report.ratios(seconds[one], seconds[other])

    return ratios


GOALS: tuple[report.Goal, ...] = (
    ("8 rows of 8 deltas against 8 rows of one model", ">=", 0.35, "x", _ratio(OF_ONE, DELTAS)),
    ("8 rows of 8 deltas against 8 whole models in turns", ">=", 2.2, "x", _ratio(TURNS, DELTAS)),
    ("one row of a delta against one of a whole model", "<=", 1.25, "x", _ratio(ONE_DELTA, ONE)),
    ("a prompt of a delta against a whole model's", "<=", 1.7, "x",
     _ratio(PROMPT_OF_DELTA, PROMPT)),
    ("a further fine-tune in memory", "<=", 40, "MB",
     lambda r: [size / 1e6 for size in r["speeds"]["delta_bytes"]]),
)  # fmt: skip


def rows(results: Results) -> Iterator[Row]:
    if "speeds" not in results:
        return
    speeds = results["speeds"]
    for kind, seconds in speeds["seconds"].items():
        yield kind, f"{1000 * statistics.median(seconds):.2f}"
    yield "a delta, MB", f"{statistics.median(speeds['delta_bytes']) / 1e6:.1f}"
    yield "a whole model, MB", f"{speeds['whole_bytes'] / 1e6:.1f}"
