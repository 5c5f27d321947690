"""Measures answers that are constrained by a form, in one engine."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import psutil

from benchmarks.engine.request import Request
from benchmarks.report import tables as report
from benchmarks.report.tables import Results, Row
from benchmarks.run import Run, in_turns, seconds_of
from common.errors import EngineError
from common.form import Form, json_schema
from engine.artifacts.config import GPT2Config
from engine.engine import Engine
from engine.settings import Settings
from testbed import random_model

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
# Forms with which a step is timed; some allow most tokens, others few.
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
# Forms that need a large automaton, grammar or recursion.
HOSTILE: dict[str, dict[str, Any]] = {
    "nested repetition": {"regex": "(([ab]{0,50}c){0,50}d){0,50}"},
    "large automaton": {"regex": "[ab]*a[ab]{30}[ab]*b[ab]{30}"},
    "look into the past": {"regex": "(.*a.{200})|(.*b.{300})"},
    "many alternatives": {"regex": "|".join("a" * (i % 60) + f"{i}" for i in range(1900))},
    "ambiguous grammar": {"grammar": 'start: a\na: a a a a a a | "긍정" |'},
    "lists of lists": {
        "json_schema": {
            "type": "array",
            "minItems": 1000,
            "items": {"type": "array", "minItems": 1000, "items": {"type": "integer"}},
        }
    },
}
STALL_TOKENS = 32  # of the other row before the form is sent, and at most of the form's answer


@dataclass(frozen=True)
class Plan:
    config: GPT2Config = random_model.FULL
    rounds: int = 9
    new_tokens: int = 64
    prompt_tokens: int = 32


def _against(results: Results, rows: int) -> list[float]:
    """Return the ratio of the slowest form's steps to those without a form, by round."""
    measured = {one["form"]: one["seconds"] for one in results["steps"] if one["rows"] == rows}
    none = measured.pop("none")
    return max((report.ratios(each, none) for each in measured.values()), key=statistics.median)


GOALS: tuple[report.Goal, ...] = (
    ("a step of one row, held to a form, against none", "<=", 1.05, "x", lambda r: _against(r, 1)),
    ("the same of eight rows", "<=", 1.05, "x", lambda r: _against(r, 8)),
    ("another row's longest wait for a token beside a hostile form", "<=", 100, "ms",
     lambda r: report.in_ms(np.max([s["longest"] for s in r["stalls"]], axis=0).tolist())),
    (f"a schema of {FIELDS} fields is ready", "<=", 20, "ms",
     lambda r: report.in_ms(r["ready"]["schema"])),
)  # fmt: skip


def lines(results: Results) -> str:
    config = results["plan"]["config"]
    what = (
        f"random weights of {config['num_layers']} x {config['units']} with a vocabulary of"
        f" {config['vocab_size']:,}, each token one character"
    )
    tables = [
        (("a step held to", "rows", "ms", "against none"), _step_rows(results)),
        (("an answer", "tokens", "ms", "against as many tokens"), _answer_rows(results)),
        (("a form", "ms"), _ready_rows(results)),
        (("beside a hostile form", "longest ms", "before"), _stall_rows(results)),
    ]
    return report.page(results, what, tables)


def _step_rows(results: Results) -> Iterator[Row]:
    none: dict[int, list[float]] = {}
    for one in results.get("steps", []):
        against = _ratio(one["seconds"], none.setdefault(one["rows"], one["seconds"]))
        yield one["form"], str(one["rows"]), _ms(one["seconds"]), against


def _answer_rows(results: Results) -> Iterator[Row]:
    for one in results.get("answers", []):
        ratio = _ratio(one["seconds"], one["free_s"])
        yield one["answer"], str(one["tokens"]), _ms(one["seconds"]), ratio


def _ready_rows(results: Results) -> Iterator[Row]:
    if measured := results.get("ready"):
        size = f"{report.mb(measured['first_bytes'])} MB"
        yield f"the first of a tokenizer, which takes {size}", _ms([measured["first"]])
        yield f"a schema of {FIELDS} fields", _ms(measured["schema"])
        yield "the same again", _ms(measured["again"])


def _stall_rows(results: Results) -> Iterator[Row]:
    for one in results.get("stalls", []):
        yield one["form"], _ms(one["longest"]), _ms(one["before"])


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.2f}"


def _ratio(seconds: list[float], others: list[float]) -> str:
    return f"{statistics.median(report.ratios(seconds, others)):.2f}x"


class FormsRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 1, 8, 4)
    PARTS = DEFAULT = ("ready", "steps", "answers", "stalls")
    GOALS = GOALS
    LINES = lines

    def prepare(self) -> None:
        config, self._random = self.plan.config, np.random.default_rng(0)
        base = random_model.make(self.store, config, 0)
        folder = self.workdir / f"forms-{config.num_layers}x{config.units}"
        if not folder.exists():
            random_model.copy(base, folder)
            used = map(ord, "".join((*LABELS, *_schema(0)["properties"], "이름")))
            characters = (*random_model.ASCII, *used, *random_model.CHARACTERS)
            tokenizer = random_model.spiece(config.vocab_size, characters)
            (folder / "kogpt2.spiece").write_bytes(tokenizer)
        # With a prefix cache, the second round would differ from the first.
        self._engine = Engine(Settings(memory_mib=4096, prefix_cache_mib=0))
        self.opened.callback(self._engine.close)
        self._engine.load("m", str(folder))

    def _ids(self) -> list[int]:
        size = self.plan.prompt_tokens
        ids: list[int] = self._random.integers(100, self.plan.config.vocab_size, size).tolist()
        return ids

    def _ask(self, rows: int, parameters: dict[str, Any]) -> tuple[list[float], int]:
        """Send `rows` requests; return the seconds until each token, and the number of steps."""
        counters = self._engine._find("m").statistics
        steps = counters.steps
        began = time.perf_counter()
        requests = [Request(self._engine, self._ids(), **parameters) for _ in range(rows)]
        came = sorted(when - began for request in requests for when in request.wait().came)
        return came, counters.steps - steps

    def steps(self) -> list[Results]:
        """Measure the seconds of a decode step, by form and number of rows, in turns."""

        def step_s(form: str, rows: int) -> float:
            given = {"new_tokens": self.plan.new_tokens, "ignore_eos": True}
            came, steps = self._ask(rows, {**given, **STEPS[form]})
            begun = came[2 * rows - 1]  # all rows have their first two tokens by then
            return (came[-1] - begun) / max(steps - 1, 1)

        ways = {(form, rows): partial(step_s, form, rows) for rows in ROWS for form in STEPS}
        return [
            {"form": form, "rows": rows, "seconds": seconds}
            for (form, rows), seconds in in_turns(ways, self.plan.rounds, 1).items()
        ]

    def ready(self) -> Results:
        """Measure seconds until a form can be used: a tokenizer's first, and further forms."""
        vocabulary = self._engine._find("m").texts._vocabulary

        def compile_(form: Form) -> None:
            vocabulary.constrain(form).result().clear()

        def size() -> int:
            total = 0
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # a form's process that has just ended
                    total += process.memory_full_info().uss
            return total

        before = size()
        first = seconds_of(lambda: compile_(json_schema("", {"type": "boolean"})))
        measured: Results = {"first": first, "first_bytes": size() - before}
        forms = [json_schema("", _schema(i)) for i in range(self.plan.rounds)]
        for which in ("schema", "again"):
            measured[which] = [seconds_of(partial(compile_, form)) for form in forms]
        return measured

    def answers(self) -> list[Results]:
        """Measure whole answers with a form, and as many tokens without a form."""

        def answer(name: str) -> tuple[int, int, float, float]:
            came, steps = self._ask(1, {"new_tokens": 100, **ANSWERS[name]})
            free, _ = self._ask(1, {"new_tokens": len(came), "ignore_eos": True})
            return len(came), steps, came[-1], free[-1]

        ways = {name: partial(answer, name) for name in ANSWERS}
        results = []
        for name, rounds in in_turns(ways, self.plan.rounds, 1).items():
            tokens, steps, seconds, free_s = zip(*rounds, strict=True)
            times = {"seconds": [*seconds], "free_s": [*free_s]}
            results.append({"answer": name, **times, "tokens": tokens[-1], "steps": steps[-1]})
        return results

    def stalls(self) -> list[Results]:
        """Measure the longest gap between another row's tokens, before and after a hostile form."""
        ids = self._ids()
        most = self.plan.config.max_length - len(ids)

        def stall(name: str) -> tuple[float, float]:
            other = Request(self._engine, ids, most, ignore_eos=True)
            other.wait_for_tokens(STALL_TOKENS)
            sent = time.perf_counter()
            with contextlib.suppress(EngineError):  # the engine refuses the form
                Request(self._engine, ids, STALL_TOKENS, **HOSTILE[name]).wait()
            other.wait_for_tokens(len(other.came) + 1)  # waits for the end of the current gap
            other.cancel()
            gaps = [(end, end - begin) for begin, end in pairwise(other.came[1:])]
            longest = max((gap for end, gap in gaps if end > sent), default=0.0)
            return max(gap for end, gap in gaps if end <= sent), longest

        ways = {name: partial(stall, name) for name in HOSTILE}
        return [
            {"form": name, "before": [a for a, _ in rounds], "longest": [b for _, b in rounds]}
            for name, rounds in in_turns(ways, self.plan.rounds).items()
        ]


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
