"""A seed is a plan; a plan is a file; the shortest plan that still shows something is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command.errors import Problem
from tests.chaos.histories import ask, fault, history, load, view
from tests.chaos.history import History
from tests.chaos.plan import KINDS, Fault, Plan
from tests.chaos.shrink import shortest


def test_a_seed_is_the_same_plan_each_time_and_another_seed_another() -> None:
    plan = Plan.draw(1, 600, 5)
    assert plan == Plan.draw(1, 600, 5)
    assert plan.faults != Plan.draw(2, 600, 5).faults
    assert 80 < len(plan.faults) < 160
    assert all(
        0 < a.at_s < b.at_s < 595 for a, b in zip(plan.faults, plan.faults[1:], strict=False)
    )


def test_every_kind_of_fault_comes() -> None:
    assert {fault.kind for fault in Plan.draw(0, 4000, 5).faults} == set(KINDS)
    only = Plan.draw(0, 100, 5, ["kill engine"])
    assert {fault.kind for fault in only.faults} == {"kill engine"}


def test_a_plan_can_be_written_and_read_again(tmp_path: Path) -> None:
    plan = Plan.draw(3, 60, 5)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"faults": [{}]}', '{"faults": [{"at_s": 1, "kind": "홍수"}]}']
)
def test_what_is_no_plan_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, "utf-8")
    with pytest.raises(Problem, match=r"plan\.json"):
        Plan.read(tmp_path / "plan.json")
    with pytest.raises(Problem, match=r"missing\.json"):
        Plan.read(tmp_path / "missing.json")


def test_a_plan_with_a_fault_that_is_not_known_is_refused(tmp_path: Path) -> None:
    Plan(0, 1, False, (Fault(0, "홍수"),)).write(tmp_path / "plan.json")
    with pytest.raises(Problem, match="unknown fault: 홍수"):
        Plan.read(tmp_path / "plan.json")


def test_a_history_can_be_written_and_read_again(tmp_path: Path) -> None:
    made = history(load(0), ask(2), faults=(fault("kill engine", 1),))
    made.views = [view()]
    made.write(tmp_path / "history.json")
    assert History.read(tmp_path / "history.json") == made


@settings(deadline=None)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_the_shortest_list_holds_what_is_needed_and_nothing_else(
    case: tuple[int, set[int]],
) -> None:
    count, needed = case
    asked = 0

    def shows(part: list[int]) -> bool:
        nonlocal asked
        asked += 1
        return needed <= set(part)

    assert shortest(range(count), shows) == sorted(needed)
    assert asked <= count * count + 4 * count + 2


def test_of_several_reasons_one_is_left() -> None:
    assert len(shortest(range(32), lambda part: bool({3, 17} & set(part)))) == 1
