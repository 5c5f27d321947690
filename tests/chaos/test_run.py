"""A short run of chaos on the whole server, with seeded clients and a fixed plan. tests/container
has the server as a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.clients import Models
from tests.chaos.history import ROUTES
from tests.chaos.plan import Fault, Plan
from tests.chaos.run import Size, run

GAP_S = 1.5
# A factor on recovery times where other tests run at the same time.
HEAL = 30.0
MODELS = Models(("소월", "동주"), ("봄",), 2)


def nothing_is_lost_wrong_or_left(
    folder: Path, multi_model: bool, *kinds: str, image: str = ""
) -> None:
    """Injects the kinds of faults and checks the history; `folder` gets the server's log."""
    faults = (Fault(1 + GAP_S * i, kind, 1.0, i) for i, kind in enumerate(kinds))
    plan = Plan(int(multi_model), 2 + GAP_S * len(kinds), multi_model, tuple(faults))
    result = run(plan, Size(5, MODELS, heal=HEAL, image=image))
    history = result.history
    report.write(folder, plan, result)
    assert result.violations == [], "\n".join(report.lines(result))
    assert {*ROUTES} <= {op.kind for op in history.ops if op.status == 200}
    assert len(history.faults) == len(kinds)
    assert not history.faults[0].skipped


@pytest.mark.slow
def test_nothing_is_lost_wrong_or_left_whatever_breaks(tmp_path: Path) -> None:
    """On demand, as processes."""
    processes = ("java", "worker", "gateway", "texts", "engine", "host", "launcher")
    faults = ("store truncate", "clock", *(f"kill {name}" for name in processes))
    nothing_is_lost_wrong_or_left(tmp_path, False, *faults)
