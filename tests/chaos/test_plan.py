"""A seed is a plan; a plan is a file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from command.errors import Problem
from tests.chaos.plan import KINDS, Fault, Plan


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
