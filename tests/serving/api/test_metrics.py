from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from serving.api import metrics as metrics_module
from serving.api.metrics import GONE_S, Metrics
from serving.errors import StoreUnavailable
from serving.process.counts import DROPPED, Counts, read_counts


def test_a_model_that_was_gone_at_the_next_scrape_was_still_there() -> None:
    now_s = 0.0
    metrics = Metrics(lambda: now_s)
    metrics.request("봄", 200, 0.1)
    line = 'kogpt2_requests_total{model="봄",status="200"} %d.0'
    for _ in range(3):  # by however many
        assert line % 1 in metrics.text(None, {}, {}).decode()
        now_s += GONE_S / 4
    metrics.request("봄", 200, 0.1)
    assert line % 2 in metrics.text(None, {"봄#1": "봄"}, {}).decode()  # it came back
    now_s += GONE_S
    assert line % 2 in metrics.text(None, {}, {}).decode()
    now_s += GONE_S
    assert "봄" not in metrics.text(None, {}, {}).decode()
    assert metrics.tallies["봄"].good[0] == 2  # the console's and Triton's, whoever scrapes


def test_a_load_by_hand_that_fails_is_counted_by_its_status() -> None:
    metrics = Metrics()
    for error in (StoreUnavailable("gone"), StoreUnavailable("gone"), ValueError("a defect")):
        with contextlib.suppress(type(error)), metrics.loading():
            raise error
    with metrics.loading():
        pass
    shown = metrics.text(None, {}, {}).decode()
    assert 'kogpt2_load_failures_total{status="503"} 2.0' in shown
    assert 'kogpt2_load_failures_total{status="500"} 1.0' in shown


def test_what_the_entrypoint_counts_is_shown_and_outlives_the_gateway(tmp_path: Path) -> None:
    counts = Counts(tmp_path)
    counts.add(DROPPED, 7)
    for _ in range(2):
        counts.add("the engine")
    for metrics in (Metrics(run_dir=tmp_path), Metrics(run_dir=tmp_path)):
        shown = metrics.text(None, {}, {}).decode()
        assert "kogpt2_dropped_log_lines_total 7.0" in shown
        assert 'kogpt2_process_restarts_total{process="engine"} 2.0' in shown
        assert 'kogpt2_process_restarts_total{process="gateway"} 0.0' in shown
    Counts(tmp_path)
    assert set(read_counts(tmp_path).values()) == {0}


def test_those_that_are_gone_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_GONE", 10)
    metrics = Metrics()
    for number in range(15):
        metrics.request(f"m{number}", 200, 0.1)
    shown = metrics.text(None, {"m0#1": "m0"}, {}).decode()
    assert shown.count("kogpt2_requests_total{") == 11
    assert 'model="m0"' in shown


def test_counts_by_name_are_bounded_without_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models come and go: those that were called last keep their counts."""
    monkeypatch.setattr(metrics_module, "MAX_LABELLED", 10)
    monkeypatch.setattr(metrics_module, "MAX_TALLIES", 12)
    metrics = Metrics()
    for number in range(30):
        metrics.request(f"모델{number}", 200, 0.1)
        metrics.request("봄", 200, 0.1)
    assert list(metrics.tallies) == [*(f"모델{number}" for number in range(19, 30)), "봄"]
    assert metrics.tallies["봄"].good[0] == 30
    shown = metrics.text(None, {}, {}).decode()
    assert shown.count("kogpt2_requests_total{") == 10
    assert shown.count("kogpt2_request_seconds_count{") == 10
    assert 'kogpt2_requests_total{model="봄",status="200"} 30.0' in shown
    assert 'model="모델20"' not in shown
