"""What the soak asks of a server, and what it calls growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import soak
from tests.chaos.__main__ import main
from tests.chaos.histories import history, op
from tests.scripts.command import run


def sample(at_s: float, rss: int) -> soak.Sample:
    return soak.Sample(at_s, rss, rss, 500, 100, 30, 20, 400, 1000, 20, 80)


def test_each_tenth_of_the_models_by_popularity_is_full_size_and_a_fifth_has_room() -> None:
    size = soak.size(16, 100, 1.0, 0.05)
    assert [
        rank for rank, name in enumerate(size.models.steady, 1) if name in size.models.full
    ] == [*range(10, 101, 10)]
    assert len(size.models.all) == 110
    assert 2 * soak.FULL_MIB < size.room_mib < 3 * soak.FULL_MIB


@pytest.mark.parametrize(("last", "drift"), [(100, 0.0), (120, 0.2), (80, -0.2)])
def test_growth_is_counted_from_after_the_warm_up(last: int, drift: float) -> None:
    samples = [sample(at, 10 if at < 10 else 100 if at < 50 else last) for at in range(61)]
    judged = soak.judged(samples, history(op("predictions", 0, 1)))
    assert judged["rss"]["drift"] == pytest.approx(drift)
    assert judged["threads"]["drift"] == 0
    assert soak.grown(judged) == (["rss", "pss"] if drift > soak.DRIFT else [])


@pytest.mark.parametrize(("last_s", "said"), [(0.105, []), (0.12, [soak.P99])])
def test_the_first_token_is_to_come_as_soon_in_the_end(last_s: float, said: list[str]) -> None:
    samples = [sample(at, 100) for at in range(61)]
    ops = [
        op("predictions-stream", at, at + 1, first_s=0.1 if at < 50 else last_s) for at in range(60)
    ]
    assert soak.grown(soak.judged(samples, history(*ops))) == said


def test_a_soak_too_short_to_compare_anything_is_refused(tmp_path: Path) -> None:
    done = run("--soak", "--minutes", "0.1", "--out", tmp_path, main=main)
    assert done.returncode == 2
    assert "--minutes is 0.1, must be at least 1 for --soak" in done.stderr
