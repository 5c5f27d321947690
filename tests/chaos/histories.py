"""Makes histories of a correct server, for tests of the checker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.chaos.history import LOAD, PUT, UNLOAD, Done, History, Op, View, text_key

MODEL = "봄"
VERSIONS = 2
numbers: Iterator[int] = itertools.count()


def text(version: int, model: str = MODEL) -> str:
    return f"{model}의 {version}번째 글"


def op(kind: str, begin: float, end: float, status: int = 200, **more: Any) -> Op:
    fields: dict[str, Any] = {"retry_after_s": 1} if status == 503 else {}
    if kind == "predictions" and status == 200:
        fields["text"] = text(0)
    return Op(f"r{next(numbers)}", 0, kind, MODEL, begin, end, status, **{**fields, **more})


def put(version: int, at: float) -> Op:
    return op(PUT, at, at + 0.1, version=version)


def load(begin: float, status: int = 200, **more: Any) -> Op:
    return op(LOAD, begin, begin + 1, status, **more)


def unload(begin: float, status: int = 200, **more: Any) -> Op:
    return op(UNLOAD, begin, begin + 1, status, **more)


def ask(begin: float, status: int = 200, **more: Any) -> Op:
    return op("predictions", begin, begin + 0.5, status, **more)


def fault(kind: str, begin: float, end: float | None = None) -> Done:
    return Done(kind, begin, begin if end is None else end)


def history(*ops: Op, multi_model: bool = True, faults: tuple[Done, ...] = ()) -> History:
    """A history with version 0 in the store, and a log line for each answer."""
    texts = {
        text_key(model, version, "predictions", 0): text(version, model)
        for model in (MODEL, "여름")
        for version in range(VERSIONS)
    }
    made = History(0, multi_model, 20, 40, texts, 0, [put(0, -1), *ops], list(faults))
    made.lines = {op.id: 1 for op in ops if op.status and op.kind != PUT}
    return made


def view(**more: Any) -> View:
    """A view in which all parts have the same model."""
    agreed = View(50, 1, [MODEL], [f"{MODEL}#a-1"], ["a-1"], ["a-1"], 1, 1)
    return replace(agreed, **more)
