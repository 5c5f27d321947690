"""compose.yaml, compose.fleet.yaml: one command starts them, a call loads a model from S3."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.container.compose import Compose
from tests.container.containers import BUILD_S, PROMPT, START_S, TEXT, docker
from tests.e2e.server import eventually

pytestmark = pytest.mark.container

PROXY_IMAGE = "kogpt2-proxy:test"


@pytest.fixture
def one(image: str) -> Iterator[Compose]:
    with closing(Compose("compose.yaml", image)) as compose:
        compose.up()
        yield compose


@pytest.fixture
def fleet(image: str) -> Iterator[Compose]:
    """The fleet without Prometheus and Grafana, for which there are no small stand-ins."""
    docker("build", "-t", PROXY_IMAGE, "tests/container/proxy", timeout_s=BUILD_S)
    settings = {"PROXY_IMAGE": PROXY_IMAGE, "NODE_MEMORY": "1g"}
    with closing(Compose("compose.fleet.yaml", image, **settings)) as compose:
        compose.up("proxy")
        yield compose


def test_a_call_loads_a_demo_model_from_the_store(one: Compose) -> None:
    eventually(one.is_ready, START_S)
    offered = one.get("/models?available=true").json()["models"]
    assert {"sowol", "dongju"} <= {model["modelName"] for model in offered}
    answer = one.predict("sowol", PROMPT)
    assert answer.json()["generated_text"].startswith(TEXT)
    metrics = one.get("/metrics").text
    fetched = next(r for r in metrics.splitlines() if r.startswith("kogpt2_fetched_bytes_total "))
    assert float(fetched.split()[1]) > 1_000_000  # over the network


def test_a_fleet_answers_while_servers_end_and_starts_them_again(fleet: Compose) -> None:
    def ask() -> tuple[int, bool, str]:
        answer = fleet.predict("sowol", PROMPT)
        return answer.status_code, TEXT in answer.text, answer.headers.get("x-served-by", "")

    def answering() -> set[str | None]:
        """The servers that were asked for names of no model, and said so."""
        found = [fleet.get(f"/v2/models/.{n}/ready") for n in range(16)]
        return {answer.headers.get("x-served-by") for answer in found if answer.status_code == 400}

    eventually(lambda: fleet.is_ready() and len(answering()) == 3, 3 * START_S)
    home = ask()[2]
    assert fleet.get("/models").status_code == 403
    seen, ended = Counter[tuple[int, bool, str]](), threading.Event()

    def client() -> None:
        while not ended.is_set():
            seen[ask()] += 1

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            eventually(lambda: seen.total() >= 8 or any(c.done() for c in clients))
            assert fleet.run("kill", home)[0] == 0
            killed = seen.total()
            eventually(lambda: seen.total() >= killed + 16 or any(c.done() for c in clients))
        finally:
            ended.set()
        for one in clients:
            one.result()
    assert {(status, right) for status, right, _ in seen} == {(200, True)}
    assert len({server for _, _, server in seen}) > 1

    # One that ends by itself is started again; who kills a container does not want it back.
    ended_by_itself = ask()[2]
    container = fleet.run("ps", "-q", ended_by_itself)[1].split()[-1]
    assert fleet.run("exec", "-T", ended_by_itself, "sh", "-c", "kill -TERM 1")[0] == 0
    restarts = ("inspect", "-f", "{{.RestartCount}}", container)
    eventually(lambda: int(docker(*restarts)) > 0 and ended_by_itself in answering(), START_S)
