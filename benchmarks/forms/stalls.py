"""Measured: how long other rows wait while a hostile form is compiled, answered or refused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from benchmarks.engine.request import Request
from benchmarks.run import Results
from common.errors import EngineError
from engine.engine import Engine

# Forms that ask for a large automaton, grammar or recursion.
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
TOKENS = 32  # before the form and, at most, of its answer


def stalls(engine: Engine, ids: list[int], rounds: int) -> Iterator[Results]:
    """Measures the longest seconds between two tokens of another row, before and after each form.

    A list for each form has a value for each round.
    """
    most = engine._find("m").config.max_length - len(ids)
    for name, form in HOSTILE.items():
        result: Results = {"form": name, "before": [], "longest": []}
        for _ in range(rounds):
            other = Request(engine, ids, most, ignore_eos=True)
            other.wait_for_tokens(TOKENS)
            sent = time.perf_counter()
            with contextlib.suppress(EngineError):  # refused
                Request(engine, ids, TOKENS, **form).wait()
            other.wait_for_tokens(len(other.came) + 1)  # the end of the gap that is under way
            other.cancel()
            gaps = [(end, end - begin) for begin, end in pairwise(other.came[1:])]
            result["before"].append(max(gap for end, gap in gaps if end <= sent))
            result["longest"].append(max((gap for end, gap in gaps if end > sent), default=0.0))
        yield result
