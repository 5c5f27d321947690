"""The checker finds the histories that no correct server makes, and only those."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.checker import check
from tests.chaos.history import LOAD, PUT, UNLOAD, Done, History, Op, View, text_key

# Histories of a correct server

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
    """With version 0 in the store, and a line of the log for each answer."""
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


def rules(history: History) -> list[str]:
    return [violation.rule for violation in check(history)]


SOUND: dict[str, tuple[Op, ...]] = {
    "loaded, asked, unloaded": (load(0), ask(2), unload(3)),
    "404 before the load": (ask(0, 404), load(1)),
    "404 after the unload": (load(0), unload(2), ask(4, 404)),
    "either while it is loaded": (load(0), ask(0.2, 404), ask(0.2)),
    "either while it is unloaded": (load(0), unload(2), ask(2.2, 404), ask(2.2)),
    "the version of the load": (load(0), put(1, 2), ask(3)),
    "a version that came during the load": (load(0), put(1, 0.5), ask(3, text=text(1))),
    "the next version after a load": (
        *(load(0), put(1, 2), unload(3), load(5), ask(7, text=text(1))),
    ),
    "a load of what is there": (load(0), load(2, 409)),
    "a load of what is unloaded just now": (load(0), unload(2), load(2.5, 409)),
    "a client that hung up": (load(0), op("predictions-stream", 2, 3, 0, hung_up=True)),
    "404 after an unload whose client hung up": (load(0), unload(2, 0, hung_up=True), ask(9, 404)),
}


@pytest.mark.parametrize("ops", SOUND.values(), ids=SOUND)
def test_a_history_of_a_correct_server_has_no_violation(ops: tuple[Op, ...]) -> None:
    assert check(history(*ops)) == []


UNSOUND: dict[str, tuple[str, tuple[Op, ...]]] = {
    "no answer": ("answered", (load(0), ask(2, 0, lost="RemoteDisconnected"))),
    "another model's text": ("right", (load(0), ask(2, text=text(0, "여름")))),
    "half a text": ("right", (load(0), ask(2, text=text(0)[:3]))),
    "a version that was not there yet": ("right", (load(0), ask(2, text=text(1)), put(1, 3))),
    "the version of before an unload": ("right", (load(0), unload(2), put(1, 4), load(5), ask(7))),
    "a version newer than the load": ("right", (load(0), put(1, 2), ask(3, text=text(1)))),
    "404 of what is loaded": ("true", (load(0), ask(2, 404))),
    "an unload of what is loaded finds nothing": ("true", (load(0), unload(2, 404))),
    "an answer of what is unloaded": ("unloaded", (load(0), unload(2), ask(4))),
    "an answer of what nobody has loaded": ("unloaded", (ask(4),)),
    "409 of a free name": ("true", (load(0), unload(2), load(4, 409))),
    "503 without a reason": ("true", (load(0), ask(2, 503))),
    "500": ("true", (load(0), ask(2, 500))),
    "429 with eight clients": ("true", (load(0), ask(2, 429))),
    "400 of a right request": ("true", (load(0), ask(2, 400))),
    "504 before the deadline": ("true", (load(0), op("predictions", 2, 10, 504))),
    "an answer after the deadline": ("in time", (load(0), op("predictions", 2, 26))),
}


@pytest.mark.parametrize(("rule", "ops"), UNSOUND.values(), ids=UNSOUND)
def test_a_violation_is_found(rule: str, ops: tuple[Op, ...]) -> None:
    assert rules(history(*ops)) == [rule]


def test_on_demand_a_call_loads_its_model_and_404_is_wrong() -> None:
    assert rules(history(ask(0), unload(1), ask(3), multi_model=False)) == []
    assert rules(history(ask(0, 404), multi_model=False)) == ["true"]
    assert rules(history(ask(0), load(1, 409), multi_model=False)) == []
    assert rules(history(load(1, 409), multi_model=False)) == ["true"]


def test_a_503_has_retry_after_unless_it_ends_a_stream() -> None:
    faults = (fault("store 503", 1),)
    silent = ask(2, 503, retry_after_s=None)
    assert rules(history(load(0), silent, faults=faults)) == ["true"]
    begun = op("predictions-stream", 2, 3, 503, retry_after_s=None, first_s=0.1)
    assert rules(history(load(0), begun, ask(2, 503), faults=faults)) == []


REASONS = [
    (503, fault("kill engine", 1)),
    (503, fault("stop zygote", 1, 1.5)),
    (500, fault("kill worker", 1)),
    (507, fault("disk run", 1, 3)),
    (403, fault("store 403", 1, 3)),
]


@pytest.mark.parametrize(("status", "reason"), REASONS)
def test_an_error_is_true_only_with_a_fault_that_gives_it(status: int, reason: Done) -> None:
    assert rules(history(load(0), ask(2, status), faults=(reason,))) == []
    skipped = Done(reason.kind, reason.begin, reason.end, "not possible here")
    for other in (skipped, fault("slow connections", 1, 3), fault(reason.kind, 90)):
        assert rules(history(load(0), ask(2, status), faults=(other,))) == ["true"]
    assert rules(history(load(0), ask(60, status), faults=(reason,))) == ["true"]


def test_only_a_gateway_that_was_killed_may_leave_a_request_without_an_answer() -> None:
    lost = (load(0), ask(2, 0, lost="RemoteDisconnected"))
    assert rules(history(*lost, faults=(fault("kill gateway", 2.2),))) == []
    assert rules(history(*lost, faults=(fault("kill engine", 2.2),))) == ["answered"]
    assert rules(history(*lost, faults=(fault("kill gateway", 1.9),))) == ["answered"]


def test_time_without_a_gateway_does_not_count() -> None:
    late = (load(0), op("predictions", 2, 28))
    assert rules(history(*late, faults=(fault("stop gateway", 3, 8),))) == []
    assert rules(history(*late, faults=(fault("stop engine", 3, 8),))) == ["in time"]
    faults = (fault("kill gateway", 3),)
    assert rules(history(*late, ask(8), faults=faults)) == []
    assert rules(history(*late, ask(3.5), faults=faults)) == ["in time"]
    assert rules(history(*late, ask(8), faults=(fault("kill engine", 3),))) == ["in time"]


def test_the_log_has_each_request_once() -> None:
    made = history(load(0), ask(2))
    made.lines[made.ops[-1].id] = 2
    assert rules(made) == ["answered"]
    made.lines[made.ops[-1].id] = 0
    assert rules(made) == ["answered"]


WRONG: list[dict[str, object]] = [
    {"listed": []},
    {"engine": []},
    {"mms": ["a-1", "a-2"]},
    {"mms": ["a-2"]},
    {"folders": []},
    {"workers": 2},
    {"sockets": 0},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_parts_that_disagree_when_all_is_quiet_are_found(wrong: dict[str, object]) -> None:
    made = history(load(0))
    made.view = view()
    assert rules(made) == []
    made.view = view(**wrong)
    assert set(rules(made)) == {"agree"}


def test_leftovers_at_the_end_are_found() -> None:
    made = history(load(0))
    made.left = ["+1 worker processes"]
    assert rules(made) == ["left"]
