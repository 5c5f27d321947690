"""The Grafana dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from common.histogram import Histogram
from serving.api.metrics import Metrics

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "kogpt2.json"
COUNTERS = ["requests", "tokens", "prompt_tokens", "cached_tokens", "steps", "rows"]
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


def test_every_metric_of_the_dashboard_is_served() -> None:
    metrics = Metrics()
    metrics.request("시", 200, 0.1)
    served = metrics.text(STATISTICS, {"시#m1": "시"}).decode()
    asked = set(
        re.findall(r"kogpt2_\w+", json.dumps(json.loads(DASHBOARD.read_text("utf-8"))["panels"]))
    )
    assert len(asked) > 10
    for name in asked:
        known = re.sub(r"_(bucket|sum|count)$", "", name)
        assert re.search(rf"^# TYPE ({name}|{known}) ", served, re.MULTILINE), name
    assert 'kogpt2_model_cached_tokens_total{model="시"} 1.0' in served
    assert "kogpt2_engine_prefix_bytes 2.0" in served
    assert 'kogpt2_model_tokens_total{model="시"} 1.0' in served
    assert 'kogpt2_model_residency{model="시",residency="parked"} 1.0' in served
