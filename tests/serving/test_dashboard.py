"""The Grafana dashboard and the page on monitoring name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.histogram import Histogram
from serving.api.metrics import Metrics
from tests.processes import REPOSITORY

DASHBOARD = REPOSITORY / "deploy/grafana/kogpt2.json"
MONITORING = REPOSITORY / "docs/operate/monitoring.md"
SETTINGS = REPOSITORY / "docs/reference/settings.md"
COUNTERS = ["requests", "tokens", "prompt_tokens", "cached_tokens", "guessed_tokens"]
COUNTERS += ["accepted_tokens", "steps", "rows", "texts"]
GAUGES = ["weight_bytes", "kv_bytes", "prefix_bytes", "running", "waiting"]
WAITED = Histogram()
WAITED.observe(0.2)
STATISTICS = {
    "budget_bytes": 10,
    "weight_bytes": 5,
    "kv_bytes": 1,
    "prefix_bytes": 2,
    "models": [
        {
            "name": "시#m1",
            "residency": "parked",
            **dict.fromkeys([*COUNTERS, *GAUGES], 1),
            **dict.fromkeys(["queue_s", "time_to_first_token_s"], WAITED.describe()),
        }
    ],
}


@pytest.fixture(scope="module")
def served() -> str:
    metrics = Metrics()
    metrics.request("시", 200, 0.1)
    return metrics.text(STATISTICS, {"시#m1": "시"}, {"시": 3, "점수": 2}).decode()


@pytest.mark.parametrize("file", [DASHBOARD, MONITORING], ids=["the dashboard", "the page"])
def test_every_metric_that_is_named_is_served(served: str, file: Path) -> None:
    named = set(re.findall(r"kogpt2_\w+\b(?!\*)", file.read_text("utf-8"))) - {"kogpt2_model_"}
    assert len(named) > 10
    for name in named:
        known = re.sub(r"_(bucket|sum|count)$", "", name)
        assert re.search(rf"^# TYPE ({name}|{known}) ", served, re.MULTILINE), name


def test_every_setting_that_the_pages_on_operation_name_is_one() -> None:
    pages = [MONITORING, *(MONITORING.with_name(f"{p}.md") for p in ("sizing", "upgrade"))]
    text = "".join(page.read_text("utf-8") for page in [*pages, REPOSITORY / "docs/api/errors.md"])
    named = set(re.findall(r"`(?!OTEL_)([A-Z]+_[A-Z_]+)", text))  # those are OpenTelemetry's own
    assert len(named) > 10
    known = re.findall(r"^\| `(\w+)` \|", SETTINGS.read_text("utf-8"), re.MULTILINE)
    assert named - set(known) == set()


def test_a_models_numbers_go_by_its_name_and_who_waits_in_the_gateway_counts(served: str) -> None:
    for line in (
        'kogpt2_model_cached_tokens_total{model="시"} 1.0',
        "kogpt2_engine_prefix_bytes 2.0",
        'kogpt2_model_tokens_total{model="시"} 1.0',
        'kogpt2_model_residency{model="시",residency="parked"} 1.0',
        'kogpt2_model_waiting{model="시"} 4.0',
        'kogpt2_model_waiting{model="점수"} 2.0',  # a script, which the engine lacks
    ):
        assert line in served
    without_engine = Metrics().text(None, {}, {"시": 3}).decode()
    assert 'kogpt2_model_waiting{model="시"} 3.0' in without_engine
