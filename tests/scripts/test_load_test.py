"""kogpt2 load-test, with Locust, against a server, an endpoint and streams; and its numbers."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
import requests

from command import environments
from scripts import load_test
from scripts.traffic import compare, loads, samples
from scripts.traffic.plan import Chooser, Plan
from scripts.traffic.samples import Sample
from tests.e2e.server import Server, eventually, free_port
from tests.scripts import command
from tests.scripts.command import output, refusal
from tests.scripts.conftest import NAMES, Poets, Run

pytestmark = pytest.mark.slow

SHORT = ("--max-new-tokens", "8")


@pytest.fixture(scope="module", autouse=True)
def _locust() -> None:
    """Installs it now where it is not: otherwise the first command that needs it does, or waits
    for another process that does, and says so among its own messages."""
    environments.ensure_environment(environments.LOAD_VENV, "load")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A load test that ends before it needs Locust, within this process."""
    too_far = AssertionError("it continues in another Python")
    monkeypatch.setattr(load_test, "use_load_environment", Mock(side_effect=too_far))
    return partial(command.run, "load-test")


def answered(server: Server, model: str) -> int:
    """Requests of a model that the server has counted as good."""
    start = f'kogpt2_requests_total{{model="{model}",status="200"}} '
    lines = server.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(start))


def measured(run: Run, file: Path, *options: str | Path, **environment: str) -> dict[str, Any]:
    """The report that a load test writes, with its `text` and `file`."""
    text = output(run("load-test", *options, "--json", file, *SHORT, **environment))
    report = json.loads(file.read_text(encoding="utf-8"))
    return {**report, "text": text, "file": file}


@pytest.fixture(scope="module")
def users(run: Run, served: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of clients against a server that has nothing loaded."""
    folder = tmp_path_factory.mktemp("load")
    for name in {*served.loaded()} & {*NAMES}:
        assert served.unload(name).status_code == 200
    before = {name: answered(served, name) for name in NAMES}
    prompts = folder / "prompts.txt"
    prompts.write_text("나는 오늘\n\n비가 오는 날에는\n", encoding="utf-8")
    plan = ("--models", ",".join(NAMES), "--users", "3", "--seconds", "3", "--zipf", "1.5")
    report = measured(run, folder / "a.json", "--url", served.url(""), *plan, "--prompts", prompts)
    return {**report, "counted": {n: answered(served, n) - before[n] for n in NAMES}}


def test_the_report_counts_what_the_server_counted_with_latencies_and_cold_starts(
    users: dict[str, Any],
) -> None:
    everything, models, loaded = users["all"], users["models"], users["loads"]
    assert everything["errors"] == 0
    assert everything["requests"] == sum(users["counted"].values()) > 10
    for name, count in users["counted"].items():
        assert models[name]["requests"] == count
        assert re.search(rf"\n{name} +{count} ", users["text"])
    shares = [models[name]["share"] for name in NAMES]
    assert shares == pytest.approx([1 / 1.54579, 0.35355 / 1.54579, 0.19245 / 1.54579], rel=1e-3)
    assert models["m0"]["requests"] > models["시/봄"]["requests"]
    seconds = everything["seconds"]
    assert 0 < seconds["p50"] <= seconds["p99"] <= seconds["max"] < 60
    assert everything["outside_model_s"]["p50"] < seconds["p99"]
    assert everything["tokens"] <= 8 * everything["requests"]
    assert everything["tokens_per_s"] == pytest.approx(everything["tokens"] / users["seconds"])
    assert everything["first_token_s"] is None
    called = [name for name in NAMES if models[name]["requests"]]
    assert (loaded["source"], loaded["count"]) == ("/metrics", len(called))
    assert sorted(loaded["models"]) == sorted(called)
    for name in called:
        assert models[name]["first_call_s"] >= loaded["models"][name]["mean_s"]


def test_two_reports_are_compared(alone: Run, users: dict[str, Any], tmp_path: Path) -> None:
    first, second = users["file"], tmp_path / "b.json"
    slower = json.loads(first.read_text(encoding="utf-8"))
    slower["all"]["seconds"]["p50"] *= 2
    slower["plan"]["users"] = 8
    second.write_text(json.dumps(slower), encoding="utf-8")
    shown = output(alone("--compare", first, second))
    lines = {line.split("  ")[0]: line for line in shown.splitlines() if line}
    assert lines["latency p50 ms"].endswith("2.00x")
    assert lines["latency p99 ms"].endswith("1.00x")
    assert "시/봄: latency p50 ms" in lines
    assert "users: 3 and 8" in shown
    assert compare.ratio(0.0, 1.0) == compare.ratio(None, 1.0) == compare.ratio(1.0, None) == ""
    second.write_text("[1]", encoding="utf-8")
    message = refusal(alone("--compare", first, second), 2)
    assert "is not a report of kogpt2 load-test" in message
    assert "cannot read" in refusal(alone("--compare", first, "/nowhere.json"), 2)


def test_requests_at_a_rate_with_the_first_token_of_streams(
    run: Run, served: Server, tmp_path: Path
) -> None:
    options = ("--rate", "20", "--seconds", "3", "--warm-up", "0.5", "--stream", "--models", "m0")
    found = measured(run, tmp_path / "a.json", "--url", served.url(""), *options)
    assert 30 <= found["all"]["requests"] <= 95  # 60 on average, Poisson
    first, whole = found["all"]["first_token_s"], found["all"]["seconds"]
    assert 0 < first["p50"] < whole["p50"]
    assert found["all"]["tokens"] > found["all"]["requests"]
    assert "token 1 p50" in found["text"]


def test_an_endpoint_is_tested_through_the_platforms_api(
    run: Run, poets: Poets, tmp_path: Path
) -> None:
    options = ("--endpoint", "poets", "--models", "m0,시/봄", "--users", "2", "--seconds", "3")
    found = measured(run, tmp_path / "a.json", *options, **poets.environment)
    assert found["all"]["requests"] > 4
    assert found["all"]["tokens_per_s"] > 0
    assert "--cloudwatch" in found["loads"]["unknown"]


def test_a_dry_run_shows_the_plan_and_sends_nothing(run: Run, served: Server) -> None:
    before = [answered(served, name) for name in NAMES]
    options = ("--url", served.url(""), "--dry-run", "--rate", "3")
    shown = output(run("load-test", *options, *SHORT))
    shares = dict(line.split()[:2] for line in shown.splitlines()[1:4])
    assert shares == {"m0": "54.5", "m1": "27.3", "시/봄": "18.2"}
    assert "3 requests/s for 30 s" in shown
    assert f"POST {served.url('/predictions/')}" in shown
    assert [answered(served, name) for name in NAMES] == before


def test_errors_are_counted_by_kind_and_fail_the_test(run: Run, served: Server) -> None:
    options = ("--models", "m0,없음", "--zipf", "0", "--seconds", "1", "--users", "2")
    done = run("load-test", "--url", served.url(""), *options, *SHORT)
    assert done.returncode == 1
    assert re.search(r"^error 404 ModelNotFoundException: [1-9]", done.stdout, re.M)
    assert "없음" in done.stdout


@pytest.mark.parametrize("how", [("--users", "3"), ("--rate", "10")])
def test_a_server_that_never_answers_does_not_hold_a_test_up(
    run: Run, how: tuple[str, str]
) -> None:
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        limits = ("--seconds", "1", "--timeout", "2")
        done = run("load-test", "--url", url, "--models", "m0", *how, *limits)
    assert time.monotonic() - started < 60
    assert (done.returncode, "timeout" in done.stdout) == (1, True)


def test_an_interrupted_test_with_locusts_page_reports_what_it_has(served: Server) -> None:
    port, before = free_port(), answered(served, "m0")
    target = ["--url", served.url(""), "--models", "m0", "--seconds", "600", *SHORT]

    def names() -> list[str]:
        with contextlib.suppress(requests.ConnectionError):
            answer = requests.get(f"http://127.0.0.1:{port}/stats/requests", timeout=60)
            return [row["name"] for row in answer.json()["stats"]]
        return []

    with subprocess.Popen(
        [sys.executable, "-m", "scripts.start", "load-test", *target, "--web", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        eventually(lambda: "m0" in names() and answered(served, "m0") > before + 3)
        process.send_signal(2)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err.decode()
    assert b"m0" in out
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--users", "2", "--rate", "1"), "--users or --rate, not both"),
        (("--zipf", "-1"), "'--zipf': -1.0 is not in the range"),
        (("--seconds", "90000"), "at most 3600"),
        (("--prompts", "/nowhere.txt"), "cannot read /nowhere.txt"),
        (("--models", ","), "names no model"),
        (("--json", "/nowhere/a.json"), "cannot write /nowhere/a.json"),
        (("--cloudwatch",), "--cloudwatch is for --endpoint"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(
    alone: Run, options: tuple[str, ...], message: str
) -> None:
    assert message in refusal(alone(*options), 2)


def test_a_file_without_models_is_refused_as_such(alone: Run, tmp_path: Path) -> None:
    names = tmp_path / "모델.txt"
    names.write_text("\n", encoding="utf-8")
    assert f"--models @{names} names no model" in refusal(alone("--models", f"@{names}"), 2)


def test_a_server_that_is_not_there_is_one_line(run: Run) -> None:
    message = "does not answer: start the server with ./scripts/serve"
    for models in ((), ("--models", "m0")):
        assert message in refusal(run("load-test", "--url", "http://127.0.0.1:9", *models), 2)


def test_clients_pause_while_a_server_is_gone(run: Run, tmp_path: Path) -> None:
    """It answers once, when the test begins, and then refuses connections."""
    path, listener = tmp_path / "a.json", socket.create_server(("127.0.0.1", 0))

    def answer_once() -> None:
        connection, _ = listener.accept()
        listener.close()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        connection.close()

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(answer_once)
        limits = ("--users", "2", "--seconds", "2", "--json", str(path))
        done = run("load-test", "--url", url, "--models", "m0", *limits)
        answered.result()
    assert done.returncode == 1
    found = json.loads(path.read_text(encoding="utf-8"))
    assert 2 <= found["all"]["errors"] <= 2 * 3  # each client once a second


# Numbers


def plan(**changes: Any) -> Plan:
    given = {
        "where": "", "models": ("a", "b", "c"), "prompts": ("가", "나"), "parameters": {},
        "zipf": 1.0, "users": 1, "rate": None, "seconds": 1.0, "warm_up_s": 0.0,
        "timeout_s": 1.0, "stream": False, "seed": 0,
    }  # fmt: skip
    return Plan(**{**given, **changes})


def test_choices_follow_zipf_and_the_seed() -> None:
    chooser = Chooser(plan(), 1)
    drawn = [chooser.next() for _ in range(20_000)]
    counts = Counter(model for model, _ in drawn)
    for model, share in zip("abc", (6 / 11, 3 / 11, 2 / 11), strict=True):
        assert counts[model] / 20_000 == pytest.approx(share, abs=0.02)
    assert {json.loads(body)["inputs"] for _, body in drawn} == {"가", "나"}
    for seeded, same in ((Chooser(plan(), 1), True), (Chooser(plan(seed=1), 1), False)):
        assert ([seeded.next() for _ in range(50)] == drawn[:50]) == same
    pauses = [chooser.pause_s(5) for _ in range(20_000)]
    assert sum(pauses) / 20_000 == pytest.approx(0.2, rel=0.05)


def test_percentiles_are_values_that_were_measured() -> None:
    found = samples.distribution([float(n) for n in range(100, 0, -1)])
    assert found == {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "mean": 50.5, "max": 100}
    assert set((samples.distribution([7.0]) or {}).values()) == {7.0}
    assert samples.distribution([]) is None


def test_failed_requests_count_as_errors_and_not_as_latencies() -> None:
    measured = [
        Sample("a", 0.0, 2.0, tokens=10, server_s=0.5),
        Sample("a", 3.0, 1.0, tokens=30, server_s=0.5),
        Sample("a", 1.0, 60.0, error="timeout"),
        Sample("b", 2.0, 60.0, error="timeout"),
        Sample("b", 4.1, 60.0, error="timeout"),  # it was begun a little late
    ]
    found = samples.results(measured, ["a", "b"], [0.5, 0.5], 4.0)
    every = found["all"]
    assert (every["requests"], every["errors"], every["requests_per_s"]) == (5, 3, 0.5)
    assert (every["tokens_per_s"], every["seconds"]["max"]) == (10, 2.0)
    assert every["outside_model_s"]["max"] == 1.5
    assert found["models"]["a"]["first_call_s"] == 2.0
    assert found["models"]["b"]["first_call_s"] is None
    assert found["models"]["b"]["seconds"] is None
    assert found["errors"] == [{"what": "timeout", "count": 3}]


def test_cold_starts_of_an_endpoint_come_from_cloudwatch(
    poets: Poets, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in poets.environment.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("cloudwatch")
    counter = loads.CloudWatch("poets", client, delay_s=0)
    assert "no ModelCacheHit" in counter.end()["unknown"]
    now = datetime.now(timezone.utc)
    own = [
        {"Name": name, "Value": value}
        for name, value in (("EndpointName", "poets"), ("VariantName", "AllTraffic"))
    ]
    other = [{"Name": "EndpointName", "Value": "other"}, own[1]]

    def put(metric: str, values: list[float], dimensions: Any, at: datetime = now) -> None:
        data = [
            {"MetricName": metric, "Dimensions": dimensions, "Timestamp": at, "Value": value}
            for value in values
        ]
        client.put_metric_data(Namespace="AWS/SageMaker", MetricData=data)

    put("ModelCacheHit", [1, 0, 1, 1, 0], own)
    put("ModelCacheHit", [0, 0, 0], other)
    put("ModelCacheHit", [0, 0, 0], own, now - timedelta(hours=1))
    put("ModelLoadingTime", [200_000.0, 400_000.0], own)
    found = counter.end()
    client.close()
    assert (found["source"], found["count"]) == ("CloudWatch", 2)
    assert found["mean_s"] == pytest.approx(0.3)
