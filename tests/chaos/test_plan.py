"""A seed is a plan; a plan is a file; the shortest plan that still fails is found."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command.errors import Problem
from tests.chaos.plan import KINDS, Fault, Plan
from tests.chaos.shrink import shortest


def test_a_seed_is_always_the_same_plan_of_every_kind_of_fault(tmp_path: Path) -> None:
    plan = Plan.draw(1, 4000, 5)
    assert plan == Plan.draw(1, 4000, 5)
    assert plan.faults != Plan.draw(2, 4000, 5).faults
    assert {fault.kind for fault in plan.faults} == set(KINDS)
    assert 600 < len(plan.faults) < 1000
    assert all(0 < a.at_s < b.at_s < 3995 for a, b in pairwise(plan.faults))
    only = Plan.draw(0, 100, 5, ["kill engine"])
    assert {fault.kind for fault in only.faults} == {"kill engine"}
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"faults": [{}]}', None])
def test_a_malformed_plan_is_refused_in_one_sentence(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text, "utf-8")
    with pytest.raises(Problem, match=r"plan\.json"):
        Plan.read(tmp_path / "plan.json")


def test_a_plan_with_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    Plan(0, 1, False, (Fault(0, "홍수"),)).write(tmp_path / "plan.json")
    with pytest.raises(Problem, match="unknown fault: 홍수"):
        Plan.read(tmp_path / "plan.json")


@settings(deadline=None)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_the_shortest_list_has_what_is_needed_and_nothing_else(case: tuple[int, set[int]]) -> None:
    count, needed = case
    calls = 0

    def fails(part: list[int]) -> bool:
        nonlocal calls
        calls += 1
        return needed <= set(part)

    assert shortest(range(count), fails) == sorted(needed)
    assert calls <= count * count + 4 * count + 2


def test_of_several_reasons_one_is_left() -> None:
    assert len(shortest(range(32), lambda part: bool({3, 17} & set(part)))) == 1
