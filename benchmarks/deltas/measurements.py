"""Measures how far a delta of a base is from its fine-tune in fp32, beside int8 of the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path

from tqdm import tqdm

from benchmarks.deltas import speeds
from benchmarks.engine import accuracy
from benchmarks.report import tables as report
from benchmarks.report.tables import Results, Row
from benchmarks.run import Run
from command.logits import Reference
from common.memory import MIB
from engine import backends
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from engine.native.delta import NoDelta, open_delta
from testbed import fine_tunes, random_model


@dataclass(frozen=True)
class Plan:
    config: GPT2Config = random_model.FULL  # of the base with random weights
    base_steps: int = fine_tunes.PAGES_STEPS
    steps: int = 0  # of each fine-tune; 0: its own
    fine_tunes: int = 3  # of each base, at most
    prompts: int = 24
    prompt_tokens: int = 16
    new_tokens: int = 32
    rounds: int = 20


def _against_int8(results: Results) -> list[float]:
    """Return the highest ratio of a delta's KL to that of int8, of all that are deltas."""
    measured = [one for part in fine_tunes.KINDS for one in results[part].values()]
    ratios = (
        one["delta"]["kl_divergence"] / one["int8"]["kl_divergence"]
        for one in measured
        if "delta" in one
    )
    return [max(ratios)]


GOALS: tuple[report.Goal, ...] = (
    *speeds.GOALS,
    ("KL of a delta against that of int8, on the worst fine-tune", "<=", 1.5, "x", _against_int8),
)  # fmt: skip


def lines(results: Results) -> str:
    plan = results["plan"]
    what = (
        f"{plan['prompts']} prompts of {plan['prompt_tokens']} tokens of each fine-tune's text,"
        f" {plan['new_tokens']} new ones"
    )
    head = ("fine-tune against its fp32", "", "MiB", *accuracy.COLUMNS)
    tables = [(head, _rows(results)), (("random weights", "ms"), speeds.rows(results))]
    return report.page(results, what, tables)


def _rows(results: Results) -> Iterator[Row]:
    for part in fine_tunes.KINDS:
        for name, measured in results.get(part, {}).items():
            if "whole" in measured:
                yield name, f"no delta: {measured['whole']}", "", "", "", "", ""
            for way in ("delta", "int8"):
                if (one := measured.get(way)) is not None:
                    yield name, way, f"{one['bytes'] / MIB:.1f}", *accuracy.cells(one)


class DeltasRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 2, 2, 1, 4, 8, 8, 2)
    PARTS = DEFAULT = (*fine_tunes.KINDS, "speeds")
    GOALS = GOALS
    LINES = lines

    def speeds(self) -> Results:
        return speeds.measure(self.workdir, self.plan.config, self.plan.rounds)

    def _fine_tunes_of(self, name: str) -> Results:
        models = self.workdir / "fine-tunes"
        base = fine_tunes.make_base(models, name, self.plan.config, self.plan.base_steps)
        results: Results = {}
        kinds = fine_tunes.KINDS[name][: self.plan.fine_tunes]
        for kind in tqdm(kinds, desc=name, leave=False, disable=None):
            kind = dataclasses.replace(kind, steps=self.plan.steps or kind.steps)
            folder = fine_tunes.fine_tune(models, base, kind)
            title = f"{name}, {kind.steps} steps at {kind.learning_rate:.0e}"
            results[title] = self._compared(open_artifact(folder), open_artifact(base), kind.text)
        return results

    dongju = partialmethod(_fine_tunes_of, "dongju")
    pages = partialmethod(_fine_tunes_of, "pages")
    random = partialmethod(_fine_tunes_of, "random")

    def _compared(self, whole: Artifact, base: Artifact, text: Path) -> Results:
        """Return the errors of a fine-tune's delta, or why it has none, and of int8."""
        cache, results = self.workdir / "prepared", dict[str, object]()
        count, size = self.plan.prompts, self.plan.prompt_tokens
        prompts = accuracy.prompts_of(text, whole.tokenizer_file, count, size)
        with closing(backends.load(whole, "native", "fp32", cache_dir=cache)) as exact:
            reference = Reference(exact, prompts, self.plan.new_tokens)
        with closing(backends.load(whole, "native", "int8", cache_dir=cache)) as int8:
            compared = dataclasses.asdict(reference.compare(int8))
            results["int8"] = {**compared, "bytes": int8.weight_bytes}
        try:
            delta = open_delta(whole, base, cache)
        except NoDelta as error:
            return {**results, "whole": error.message}
        with (
            closing(delta.load()) as adapter,
            closing(backends.load(base, "native", "int8", cache_dir=cache)) as model,
        ):
            compared = dataclasses.asdict(reference.compare(model, adapter))
            return {"delta": {**compared, "bytes": delta.num_bytes}, **results}
