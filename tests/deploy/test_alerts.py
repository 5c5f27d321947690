"""The queries of the alerts and the dashboard name metrics and labels that exist. Each alert fires
when it should, and only then."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from serving.aliases import Alias, Aliases
from serving.api.metrics import Metrics
from serving.errors import StoreUnavailable
from tests.deploy.test_monitoring import mounts
from tests.serving.test_dashboard import STATISTICS

ROOT = Path(__file__).parents[2]
CONFIG, DASHBOARD = ROOT / "deploy/prometheus/prometheus.yml", ROOT / "deploy/grafana/kogpt2.json"
CASES = Path(__file__).with_name("alerts_test.yml")
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(CONFIG.with_name("alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
}
OF_PROMETHEUS = {"job", "instance"}  # labels that it adds to each series


def dashboard() -> Iterator[tuple[str, str]]:
    board = json.loads(DASHBOARD.read_text("utf-8"))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for panel in board["panels"]:
        for number, target in enumerate(panel["targets"]):
            yield f"{panel['title']} {number}", target["expr"]


QUERIES = {**{name: rule["expr"] for name, rule in ALERTS.items()}, **dict(dashboard())}


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, set[str]]]:
    """By metric, the values of each label, as the server gives them; `up` is Prometheus' own."""
    metrics = Metrics()
    model = SimpleNamespace(name="시", fetched=SimpleNamespace(hit=True, bytes=1))
    metrics.request("시", 200, 0.1)
    for event in ("fetched", "loaded", "unloaded", "evicted"):
        metrics.observe(event, model, 0.1)
    with contextlib.suppress(StoreUnavailable), metrics.loading():
        raise StoreUnavailable("gone")
    aliases = Aliases()
    aliases._take({"봄": Alias("봄", {"시": 1}, {"시": 2})})
    text = metrics.text(STATISTICS, {"시#m1": "시"}, {"시": 3}, (), aliases).decode()
    found: dict[str, dict[str, set[str]]] = {"up": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_metric_and_label_of_a_query_is_served(
    served: dict[str, dict[str, set[str]]], query: str
) -> None:
    without_values = re.sub(r'"[^"]*"', '""', query)
    names = set(re.findall(r"\b(?:kogpt2_\w+|up)\b", without_values))
    assert names
    assert names <= served.keys()
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", query):
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', matchers):
            assert label in served[name].keys() | OF_PROMETHEUS
            if label == "le":  # a bucket that does not exist matches nothing
                assert (operator, value in served[name]["le"]) == ("=", True)
    grouped = re.findall(r"\bby \(([^)]*)\)", query) + re.findall(
        r"^label_values\(\w+, (\w+)\)", query
    )
    for label in {label.strip() for labels in grouped for label in labels.split(",")}:
        assert all(label in served[name].keys() | OF_PROMETHEUS for name in names)


def test_compose_gives_prometheus_the_alerts_where_it_looks_for_them() -> None:
    there = mounts("prometheus")
    (name,) = yaml.safe_load(CONFIG.read_text("utf-8"))["rule_files"]
    config = PurePosixPath("/etc/prometheus/prometheus.yml")
    assert there[config] == CONFIG
    assert there[config.with_name(name)] == CONFIG.with_name(name)


@pytest.mark.parametrize("page", ["docs/operate/monitoring.md", "docs/operate/monitoring.ko.md"])
def test_each_alert_has_its_line_in_the_runbook(page: str) -> None:
    lines = re.findall(r"^\| `(KoGPT2\w+)` \|", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert lines == list(ALERTS)
    for rule in ALERTS.values():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == "docs/operate/monitoring.md#alerts"
    assert "\n## Alerts\n" in (ROOT / "docs/operate/monitoring.md").read_text("utf-8")


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(CASES.read_text("utf-8"))["tests"]
    expected = [check for case in cases for check in case.get("alert_rule_test", [])]
    assert {check["alertname"] for check in expected if check.get("exp_alerts")} == ALERTS.keys()


@pytest.mark.parametrize(
    "arguments", [("check", "config", CONFIG), ("test", "rules", CASES)], ids=["check", "test"]
)
def test_promtool_agrees(arguments: tuple[str | Path, ...]) -> None:
    """`alerts_test.yml` says when each alert fires, and what an operator has to bear without one: a
    rolling restart, a slow request, a burst of errors, a load of five minutes."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it is in Debian's package prometheus")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
