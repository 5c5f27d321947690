"""Measures how far int8 is from fp32 on models with outliers, beside the peers' int8."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.contenders.contender import CONTENDERS, Contender
from benchmarks.engine import accuracy
from benchmarks.report import tables as report
from benchmarks.report.tables import Results, Row
from benchmarks.run import Run
from command.logits import comparison
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from testbed import fine_tunes, hard_model, random_model
from testbed.process import ROOT

ROWS = 8  # prompts of a batch
CONFIG = GPT2Config(8000, 384, 4, 6, 1536, 128)  # heads of 64, as the full shape has
REFERENCE, OURS, PEERS = "fp32", "int8", ("llama.cpp", "openvino")


@dataclass(frozen=True)
class Plan:
    config: GPT2Config = CONFIG
    batches: int = 3
    new_tokens: int = 64
    prompt_tokens: int = 16
    train_steps: int = fine_tunes.PAGES_STEPS


def _against_peers(results: Results) -> list[float]:
    """Return the highest ratio of our KL to the better peer's, of all models."""
    models = [model for part in HardRun.PARTS for model in results[part].values()]
    return [max(_kl(model[OURS]) / min(_kl(model[p]) for p in PEERS) for model in models)]


def _kl(measured: Results) -> float:
    value: float = measured["kl_divergence"]
    return value


GOALS: tuple[report.Goal, ...] = (
    ("KL of int8 against the better peer's, on the worst model", "<=", 1, "x", _against_peers),
)  # fmt: skip


def lines(results: Results) -> str:
    config, plan = results["plan"]["config"], results["plan"]
    what = (
        f"demo models, one of 5.8 million parameters ({plan['train_steps']} steps on Korean pages),"
        f" and random weights of {config['num_layers']} x {config['units']} with a vocabulary of"
        f" {config['vocab_size']:,}; {ROWS * plan['batches']} prompts of {plan['prompt_tokens']}"
        f" tokens, {plan['new_tokens']} new ones"
    )
    head = ("KL to fp32", *(one.label for one in _compared()))
    each = ("of fp32", "engine", *accuracy.COLUMNS)
    return report.page(results, what, [(head, _kl_rows(results)), (each, _rows(results))])


def _compared() -> Iterator[Contender]:
    return (one for one in CONTENDERS if one.name in (OURS, *PEERS))


def _models(results: Results) -> Iterator[tuple[str, Results]]:
    for part in HardRun.PARTS:
        for kind, model in results.get(part, {}).items():
            yield f"{part}, {kind}", model


def _kl_rows(results: Results) -> Iterator[Row]:
    for name, model in _models(results):
        cells = (f"{_kl(model[one.name]):.1e}" if one.name in model else "" for one in _compared())
        yield name, *cells


def _rows(results: Results) -> Iterator[Row]:
    for name, model in _models(results):
        for one in _compared():
            if measured := model.get(one.name):
                yield name, one.label, *accuracy.cells(measured)


class HardRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 1, 8, train_steps=2)
    PARTS = DEFAULT = ("sowol", "dongju", "pages", "random")
    GOALS = GOALS
    LINES = lines

    def sowol(self) -> Results:
        return self._demo("sowol")

    def dongju(self) -> Results:
        return self._demo("dongju")

    def pages(self) -> Results:
        models = self.workdir / "fine-tunes"
        folder = fine_tunes.make_base(models, "pages", steps=self.plan.train_steps)
        return self._on_text(folder, models / "pages.txt")

    def random(self) -> Results:
        plan = self.plan
        folder = random_model.make(self.store, plan.config, 0)
        rows = ROWS * plan.batches
        return self._measured(folder, random_model.prompts(plan.config, rows, plan.prompt_tokens))

    def _demo(self, name: str) -> Results:
        folder = random_model.demo(name, self.workdir / "demo")
        return self._on_text(folder, ROOT / "model_store" / "corpus" / f"{name}.txt")

    def _on_text(self, folder: Path, text: Path) -> Results:
        """Measure a model on parts of its training text."""
        count, size = ROWS * self.plan.batches, self.plan.prompt_tokens
        tokenizer_file = open_artifact(folder).tokenizer_file
        return self._measured(folder, accuracy.prompts_of(text, tokenizer_file, count, size))

    def _measured(self, source: Path, prompts: Sequence[list[int]]) -> Results:
        """Return the errors of each contender, on each hard model made of `source`."""
        results: Results = {}
        for kind in tqdm(hard_model.KINDS, desc=source.name, leave=False, disable=None):
            folder = hard_model.make(self.workdir / "hard", source, kind)
            (reference,) = (one for one in CONTENDERS if one.name == REFERENCE)
            texts, exact = self._answers(reference, folder, prompts, None)
            results[kind] = {}
            for one in _compared():
                with self.skipping(one.name):
                    made, logits = self._answers(one, folder, prompts, texts)
                    pairs = zip(exact, logits, strict=True)
                    compared = comparison(pairs, texts, made)
                    results[kind][one.name] = dataclasses.asdict(compared)
        return results

    def _answers(
        self,
        contender: Contender,
        folder: Path,
        prompts: Sequence[list[int]],
        texts: Sequence[list[int]] | None,
    ) -> tuple[list[list[int]], Any]:
        """Return a contender's greedy texts, and logits (texts, T, V) along `texts` or its own."""
        made: list[list[int]] = []
        file = self.workdir / "logits.npy"
        log = self.log(f"{contender.name}-{folder.name}")  # the next model keeps it
        with contender.start(folder, self.workdir / "peers", log) as worker:
            for at in range(0, len(prompts), ROWS):
                batch = prompts[at : at + ROWS]
                new_tokens = self.plan.new_tokens
                made += worker.call("generate", prompts=batch, new_tokens=new_tokens)["ids"]
            given = {"prompts": [*prompts], "texts": texts or made, "file": str(file)}
            worker.call("logits", **given)
        return made, np.load(file)
