"""What a soak loads on a server, and what it calls growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import soak
from tests.chaos.__main__ import main
from tests.chaos.histories import history, op
from tests.scripts.command import run


def sample(at_s: float, rss: int) -> soak.Sample:
    return soak.Sample(at_s, rss, rss, 500, 100, 30, 20, 400, 1000, 20, 80)


def test_each_tenth_model_by_popularity_is_full_size_and_a_fifth_fits_the_memory() -> None:
    size = soak.size(16, 100, 1.0, 0.05)
    full = [rank for rank, name in enumerate(size.models.steady, 1) if name in size.models.full]
    assert full == [*range(10, 101, 10)]
    assert len(size.models.all) == 110
    assert 2 * soak.FULL_MIB < size.memory_mib < 3 * soak.FULL_MIB


@pytest.mark.parametrize(("last", "drift"), [(100, 0.0), (120, 0.2), (80, -0.2)])
def test_growth_is_counted_after_the_warm_up(last: int, drift: float) -> None:
    samples = [sample(at, 10 if at < 10 else 100 if at < 50 else last) for at in range(61)]
    judged = soak.judged(samples, history(op("predictions", 0, 1)))
    assert judged["rss"]["drift"] == pytest.approx(drift)
    assert judged["threads"]["drift"] == 0
    assert soak.grown(judged) == (["rss", "pss"] if drift > soak.DRIFT else [])


@pytest.mark.parametrize(("last_s", "grown"), [(0.105, []), (0.12, [soak.P99])])
def test_a_later_first_token_counts_as_growth(last_s: float, grown: list[str]) -> None:
    samples = [sample(at, 100) for at in range(61)]
    firsts = [0.1 if at < 50 else last_s for at in range(60)]
    ops = [op("predictions-stream", at, at + 1, first_s=s) for at, s in enumerate(firsts)]
    assert soak.grown(soak.judged(samples, history(*ops))) == grown


def test_a_soak_too_short_to_compare_anything_is_refused(tmp_path: Path) -> None:
    done = run("--soak", "--minutes", "0.1", "--out", tmp_path, main=main)
    assert done.returncode == 2
    assert "--minutes is 0.1, must be at least 1 for --soak" in done.stderr
