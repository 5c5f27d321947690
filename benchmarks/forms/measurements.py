"""Measured: answers that are held to a form, in one engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import random_model
from benchmarks.engine.request import Request
from benchmarks.forms.stalls import stalls
from benchmarks.report.goals import Goal
from benchmarks.report.tables import Row, page, table
from benchmarks.run import Results, Run
from common.form import json_schema
from engine.artifacts.config import GPT2Config
from engine.engine import Engine
from engine.settings import Settings

FIELDS = 50
LABELS = ["긍정", "부정", "중립", "모름", "해당 없음"]
OBJECT = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": LABELS},
        "certain": {"type": "boolean"},
        "subject": {"type": "string", "minLength": 4, "maxLength": 4},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["sentiment", "certain", "subject", "stars"],
    "additionalProperties": False,
}
# What a step's time is measured with: forms that allow most tokens, and few.
STEPS: dict[str, dict[str, Any]] = {
    "none": {},
    "any text": {"regex": r"(.|\n)*"},
    "text of limited length": {"regex": r"(.|\n){1000}"},
    "JSON string": {"json_schema": {"type": "string", "minLength": 1000}},
    "digits": {"regex": "[0-9 ]{1000}"},
}
ANSWERS: dict[str, dict[str, Any]] = {
    "one of five labels": {"choice": LABELS},
    "the same, with probabilities": {"choice": LABELS, "choice_logprobs": True},
    "an object of four fields": {"json_schema": OBJECT},
}
ROWS = (1, 8)


@dataclass(frozen=True)
class Plan:
    config: GPT2Config = random_model.FULL
    rounds: int = 9
    new_tokens: int = 64
    prompt_tokens: int = 32


def _against(results: Results, rows: int) -> list[float]:
    """Of the dearest form's steps over those without a form, round by round."""
    measured = {one["form"]: one["seconds"] for one in results["steps"] if one["rows"] == rows}
    none = measured.pop("none")
    ratios = [[a / b for a, b in zip(seconds, none, strict=True)] for seconds in measured.values()]
    return max(ratios, key=statistics.median)


GOALS: tuple[Goal, ...] = (
    ("a step of one row, held to a form, against none", "<=", 1.05, "x", lambda r: _against(r, 1)),
    ("the same of eight rows", "<=", 1.05, "x", lambda r: _against(r, 8)),
    ("another row's longest wait for a token beside a hostile form", "<=", 100, "ms",
     lambda r: (1000 * np.max([s["longest"] for s in r["stalls"]], axis=0)).tolist()),
    (f"a schema of {FIELDS} fields is ready", "<=", 20, "ms",
     lambda r: [1000 * s for s in r["ready"]["schema"]]),
)  # fmt: skip


class FormsRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 1, 8, 4)
    PARTS = ("steps", "ready", "answers", "stalls")
    DEFAULT = PARTS
    GOALS = GOALS

    def __init__(self, plan: Plan, wanted: Any, workdir: Path) -> None:
        super().__init__(plan, wanted, workdir)
        self._random = np.random.default_rng(0)

    def measure(self, save: Callable[[], object]) -> None:
        config = self.plan.config
        base = random_model.make(self.workdir / "models", config, 0)
        folder = self.workdir / f"forms-{config.num_layers}x{config.units}"
        if not folder.exists():
            random_model.copy(base, folder)
            used = [(ord(letter), ord(letter)) for letter in "".join(LABELS)]
            characters = (*random_model.ASCII, *used, *random_model.CHARACTERS)
            (folder / "kogpt2.spiece").write_bytes(
                random_model.spiece(config.vocab_size, characters)
            )
        # What is kept of prompts would make the second round another than the first.
        self._engine = Engine(Settings(memory_mib=4096, prefix_cache_mib=0))
        try:
            self._engine.load("m", str(folder))
            parts = {
                "ready": self._ready,
                "steps": self._steps,
                "answers": self._answers,
                "stalls": lambda: [*stalls(self._engine, self._ids(), self.plan.rounds)],
            }
            self.measure_parts(parts, save)
        finally:
            self._engine.close()

    def _ids(self) -> list[int]:
        size = self.plan.prompt_tokens
        ids: list[int] = self._random.integers(100, self.plan.config.vocab_size, size).tolist()
        return ids

    def _ask(self, rows: int, **parameters: Any) -> tuple[list[float], int]:
        """When each token came, in seconds from the first request on; how many steps there were."""
        counters = self._engine._find("m").statistics
        steps = counters.steps
        began = time.perf_counter()
        requests = [Request(self._engine, self._ids(), **parameters) for _ in range(rows)]
        came = sorted(when - began for request in requests for when in request.wait().came)
        return came, counters.steps - steps

    def _steps(self) -> list[Results]:
        """Seconds of a step of so many rows, round by round, in turns."""
        seconds: dict[tuple[str, int], list[float]] = {
            (form, rows): [] for rows in ROWS for form in STEPS
        }
        given = {"new_tokens": self.plan.new_tokens, "ignore_eos": True}
        for _ in range(self.plan.rounds + 1):
            for (form, rows), measured in seconds.items():
                came, steps = self._ask(rows, **given, **STEPS[form])
                begun = came[2 * rows - 1]  # all have their first two tokens by then
                measured.append((came[-1] - begun) / max(steps - 1, 1))
        return [
            {"form": form, "rows": rows, "seconds": measured[1:]}
            for (form, rows), measured in seconds.items()
        ]

    def _ready(self) -> Results:
        """Seconds until a form can be used: a tokenizer's first, and further ones."""
        vocabulary = self._engine._find("m").texts._vocabulary
        process = psutil.Process()
        before, began = process.memory_info().rss, time.perf_counter()
        vocabulary.constrain(json_schema("", {"type": "boolean"}))
        measured: Results = {
            "first": time.perf_counter() - began,
            "first_bytes": process.memory_info().rss - before,
            "schema": [],
            "again": [],
        }
        for i in range(self.plan.rounds):
            form = json_schema("", _schema(i))
            for which in ("schema", "again"):
                began = time.perf_counter()
                vocabulary.constrain(form)
                measured[which].append(time.perf_counter() - began)
        return measured

    def _answers(self) -> list[Results]:
        """Whole answers: tokens, steps and seconds, beside as many tokens without a form."""
        measured: dict[str, Results] = {
            name: {"answer": name, "seconds": [], "free_s": []} for name in ANSWERS
        }
        for _ in range(self.plan.rounds + 1):
            for name, one in measured.items():
                came, steps = self._ask(1, new_tokens=100, **ANSWERS[name])
                free, _ = self._ask(1, new_tokens=len(came), ignore_eos=True)
                one |= {"tokens": len(came), "steps": steps}
                one["seconds"].append(came[-1])
                one["free_s"].append(free[-1])
        for one in measured.values():
            del one["seconds"][0], one["free_s"][0]
        return [*measured.values()]

    def lines(self) -> str:
        config = self.plan.config
        what = (
            f"random weights of {config.num_layers} x {config.units} with a vocabulary of"
            f" {config.vocab_size:,}, each token one character"
        )
        return page(
            self.results,
            what,
            table(("a step held to", "rows", "ms", "against none"), [*self._step_rows()]),
            table(("an answer", "tokens", "ms", "against as many tokens"), [*self._answer_rows()]),
            table(("a form", "ms"), [*self._ready_rows()]),
            table(("beside a hostile form", "longest ms", "before"), [*self._stall_rows()]),
        )

    def _step_rows(self) -> Iterator[Row]:
        none: dict[int, list[float]] = {}
        for one in self.results.get("steps", []):
            seconds = one["seconds"]
            none.setdefault(one["rows"], seconds)
            ratio = statistics.median(
                a / b for a, b in zip(seconds, none[one["rows"]], strict=True)
            )
            yield one["form"], str(one["rows"]), _ms(seconds), f"{ratio:.2f}x"

    def _answer_rows(self) -> Iterator[Row]:
        for one in self.results.get("answers", []):
            ratios = [a / b for a, b in zip(one["seconds"], one["free_s"], strict=True)]
            ratio = f"{statistics.median(ratios):.2f}x"
            yield one["answer"], str(one["tokens"]), _ms(one["seconds"]), ratio

    def _ready_rows(self) -> Iterator[Row]:
        if "ready" in self.results:
            measured = self.results["ready"]
            size = f"{measured['first_bytes'] / 1e6:.0f} MB"
            yield f"the first of a tokenizer, which takes {size}", _ms([measured["first"]])
            yield f"a schema of {FIELDS} fields", _ms(measured["schema"])
            yield "the same again", _ms(measured["again"])

    def _stall_rows(self) -> Iterator[Row]:
        for one in self.results.get("stalls", []):
            yield one["form"], _ms(one["longest"]), _ms(one["before"])


def _schema(seed: int) -> dict[str, Any]:
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string", "maxLength": 40 + seed},
        {"type": "integer", "minimum": seed},
        {"enum": [*LABELS, seed]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        {"type": "object", "properties": {"이름": {"type": "string"}}, "required": ["이름"]},
    )
    fields = {f"필드 {i}": kinds[i % len(kinds)] for i in range(FIELDS)}
    return {"type": "object", "properties": fields, "required": [*fields]}


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.2f}"
