"""`/metrics` for Prometheus."""

from __future__ import annotations

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, small, text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    small(clean.store / "0")
    return clean


def metrics(server: Server, port: str = "port") -> dict[tuple[str, ...], float]:
    """By name and the values of labels in the order of their names."""
    url = f"http://{server.host}:{getattr(server, port)}/metrics"
    answer = requests.get(url, timeout=60)
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(answer.content.decode("utf-8"))
        for sample in family.samples
    }


def test_requests_are_counted_by_model_and_status(server: Server) -> None:
    for name in ("봄", '이름 "a'):
        assert server.load(name, "0").status_code == 200
    before = metrics(server)
    for _ in range(3):
        text(server.predict("봄", SHORT))
    server.predict("봄", {"inputs": ""})
    text(server.predict("이름 %22a", SHORT))
    for name in ("nothing", "%2e%2e/x", "x" * 300):
        assert server.predict(name, SHORT).status_code in (400, 404)
    after = metrics(server)

    def more(*key: str) -> float:
        return after[key] - before.get(key, 0)

    assert more("kogpt2_requests_total", "봄", "200") == 3
    assert more("kogpt2_requests_total", "봄", "400") == 1
    assert more("kogpt2_requests_total", '이름 "a', "200") == 1
    assert more("kogpt2_requests_total", "", "404") >= 1
    assert more("kogpt2_request_seconds_count", "봄") == 4
    assert more("kogpt2_model_tokens_total", "봄") == 48
    assert more("kogpt2_model_requests_total", "봄") == 3
    for waited in ("time_to_first_token", "queue"):
        name = f"kogpt2_model_{waited}_seconds"
        assert more(f"{name}_count", "봄") == 3
        assert after[f"{name}_bucket", "60.0", "봄"] == 3
        assert after[f"{name}_bucket", "+Inf", "봄"] == 3
        assert 0 < more(f"{name}_sum", "봄") < 30
    queued, answered = (f"kogpt2_model_{w}_seconds_sum" for w in ("queue", "time_to_first_token"))
    assert more(queued, "봄") < more(answered, "봄")
    # Whatever a client makes up is no label.
    assert not [key for key in after if "nothing" in key or "x" * 300 in key or "../x" in key]
    assert metrics(server, "management_port").keys() == after.keys()
    for name in ("봄", "이름 %22a"):
        server.unload(name)


def test_loads_by_hand_that_fail_are_counted(server: Server) -> None:
    failures = "kogpt2_load_failures_total"
    before = metrics(server)
    broken = server.store / "깨진"
    broken.mkdir()
    (broken / "model.params").write_bytes(b"nonsense")
    assert server.load("없음").status_code == 404
    assert server.load("깨진").status_code == 400
    assert server.load("깨진", synchronous=False).status_code == 202
    index = server.url("/v2/repository/models/없음/load")
    assert requests.post(index, timeout=60).status_code == 404

    def more(status: str) -> float:
        return metrics(server)[(failures, status)] - before.get((failures, status), 0)

    eventually(lambda: more("400") == 2)
    assert more("404") == 2


def test_metrics_come_also_without_the_engine(server: Server) -> None:
    engine = server.descendants("-m engine ")[0]
    engine.suspend()
    try:
        assert metrics(server)[("kogpt2_engine_up",)] == 0
    finally:
        engine.resume()
