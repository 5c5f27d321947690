"""What is seen of a whole server: `/metrics` for Prometheus, and traces from a client's
`traceparent` to a script."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.scripts import script
from tests.e2e.server import Server
from tests.e2e.stores import SHORT, serving, small, text
from tests.serving.api.collector import Span, collecting

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    small(clean.store / "0")
    return clean


def metrics(server: Server, management: bool = False) -> dict[tuple[str, ...], float]:
    """Return the values of metrics by name and label values, in the order of the labels' names."""
    answer = server.get("/metrics", management=management)
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
    assert metrics(server, management=True).keys() == after.keys()
    for name in ("봄", "이름 %22a"):
        server.unload(name)


def test_metrics_come_also_without_the_engine(server: Server) -> None:
    engine = server.descendants("-m engine ")[0]
    engine.suspend()
    try:
        assert metrics(server)[("kogpt2_engine_up",)] == 0
    finally:
        engine.resume()


# Traces

TRACES = [f"{i:032x}" for i in range(1, 4)]
ECHO = """
def model_fn(model_dir):
    return {}

def transform_fn(model, body, content_type, accept, context):
    return context.get_request_header(0, "traceparent")
"""


def test_a_servers_spans_are_all_sent_by_its_end(tmp_path: Path) -> None:
    store = tmp_path / "store"
    small(store / "봄")
    script(store / "메아리", ECHO)
    with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        with serving(tmp_path / "server", store, **environment) as server:
            parents = [{"traceparent": f"00-{trace}-{1:016x}-01"} for trace in TRACES]
            assert server.predict("봄", SHORT, **parents[0]).status_code == 200
            streamed = server.predict("봄", {**SHORT, "stream": True}, **parents[1])
            assert streamed.status_code == 200
            echoed = server.predict("메아리", {}, **parents[2])
            assert server.stop() == 0
        log = server.text()
    traces: dict[str, list[Span]] = {trace: [] for trace in TRACES}
    for span in collector.spans:
        traces[span.trace].append(span)
    found = [[span.name for span in spans] for spans in traces.values()]
    root = "POST /predictions/{name}"
    assert found == [
        [root, "load", "queue", "answer"],
        [root, "queue", "prompt", "tokens"],
        [root, "load", "queue", "answer"],
    ]
    for first, *others in traces.values():
        assert first.parent == f"{1:016x}"
        assert {span.parent for span in others} == {first.id}
        assert f'"trace_id": "{first.trace}"' in log
    whole, stream = (traces[trace][-1].attributes for trace in TRACES[:2])
    for usage in ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"):
        assert whole[usage] == stream[usage] > 0
    assert echoed.text == f"00-{TRACES[2]}-{traces[TRACES[2]][0].id}-01"
    assert "traces: " not in log
