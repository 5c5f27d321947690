"""Traces of a whole server, from a client's `traceparent` to a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.scripts import script
from tests.e2e.stores import SHORT, serving, small
from tests.serving.api.collector import Collector, Span

pytestmark = pytest.mark.slow

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
    with Collector() as collector:
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
