"""Measured: how long other rows wait while a hostile form is compiled, answered or refused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from benchmarks.run import Results
from common.errors import EngineError
from engine.engine import Engine
from engine.sequence import Token
from engine.text.prompts import Raw

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


class Answer:
    """A request's one answer: when each of its tokens came, on time.perf_counter()."""

    def __init__(self, engine: Engine, ids: list[int], **parameters: Any) -> None:
        self.came: list[float] = []
        self.begun, self.ended = threading.Event(), threading.Event()
        checked = engine.parameters("m", parameters)
        self._sequences = engine.submit("m", Raw(ids), checked, self._emit)
        self._engine = engine

    def _emit(self, item: Token | EngineError) -> None:
        if isinstance(item, Token):
            self.came.append(time.perf_counter())
        if len(self.came) == TOKENS:
            self.begun.set()
        if isinstance(item, EngineError) or item.finish_reason:
            self.begun.set()
            self.ended.set()

    def cancel(self) -> None:
        self._engine.cancel(self._sequences)


def stalls(engine: Engine, ids: list[int], rounds: int) -> Iterator[Results]:
    """The longest seconds between two tokens of another row, round by round, before each form is
    asked for and from then on."""
    most = engine._find("m").config.max_length - len(ids)
    for name, form in HOSTILE.items():
        found: Results = {"form": name, "before": [], "longest": []}
        for _ in range(rounds):
            other = Answer(engine, ids, ignore_eos=True, max_new_tokens=most)
            other.begun.wait()
            asked = time.perf_counter()
            with contextlib.suppress(EngineError):  # refused
                Answer(engine, ids, max_new_tokens=TOKENS, **form).ended.wait()
            count = len(other.came)
            while len(other.came) == count and not other.ended.wait(0.001):
                pass  # the gap that is under way
            other.cancel()
            gaps = [(end, end - begin) for begin, end in pairwise(other.came[1:])]
            found["before"].append(max(gap for end, gap in gaps if end <= asked))
            found["longest"].append(max((gap for end, gap in gaps if end > asked), default=0.0))
        yield found
