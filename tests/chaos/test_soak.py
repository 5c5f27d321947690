"""What a soak test counts as growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import soak
from tests.chaos.__main__ import main
from tests.chaos.test_checker import history, op
from tests.scripts.command import run


@pytest.mark.parametrize(
    ("last", "last_s", "grown"),
    [
        (100, 0.105, []),
        (80, 0.1, []),
        (120, 0.1, ["rss"]),
        (100, 0.12, [soak.P99]),
    ],
)
def test_growth_is_counted_after_the_warm_up(last: int, last_s: float, grown: list[str]) -> None:
    samples = [
        {"at_s": at, "rss": 10 if at < 10 else 100 if at < 50 else last, "threads": 30}
        for at in range(61)
    ]
    firsts = [0.1 if at < 50 else last_s for at in range(60)]
    ops = [op("predictions-stream", at, at + 1, first_s=s) for at, s in enumerate(firsts)]
    judged = soak.judged(samples, history(*ops))
    assert judged["rss"] == [100, last]
    assert soak.grown(judged) == grown


def test_a_soak_too_short_to_compare_anything_is_refused(tmp_path: Path) -> None:
    done = run("--soak", "--minutes", "0.1", "--out", tmp_path, main=main)
    assert done.returncode == 2
    assert "--minutes is 0.1, must be at least 1 for --soak" in done.stderr
