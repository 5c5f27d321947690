"""Three servers behind HAProxy or Envoy: hits as of one large server, right under faults."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from testbed.trace import Kind, trace
from tests.chaos.checker import check
from tests.chaos.clients import MIX, Clients
from tests.chaos.history import PUT, ROUTES, History
from tests.chaos.run import archives, learn_texts
from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, text
from tests.fleet.envoy import Envoy, needs_envoy
from tests.fleet.faults import CALLED, CLIENTS, FAULTS, HOT
from tests.fleet.fleet import FITTING, MODELS, Fleet, environment, fill, loads, model
from tests.fleet.haproxy import needs_haproxy
from tests.fleet.network import Network, needs_namespaces
from tests.serving.store.s3 import S3Server, s3_server

pytestmark = [needs_haproxy, needs_namespaces, pytest.mark.slow]

REQUESTS = 160
TRACE = trace(36, Kind(bursts=0, scans=0, moves=False), MODELS, REQUESTS)
SEEDS = [int(seed) for seed in os.environ.get("FLEET_SEEDS", "1").split(",")]
Put = Callable[[str, int], None]
CALLS = {kind: MIX[kind] for kind in (*ROUTES, "hang up")}
MORE = 32
PAUSE_S = 0.1  # of a client, so that servers have time to start meanwhile
HEAL = 30.0  # as in tests/chaos: other tests run at the same time
# Here a stream that has begun is cut off.
CUTS_STREAMS = {"killed", "parted_from_proxy"}
# All behind HAProxy; behind Envoy, those that a proxy has to notice.
CASES = [
    *(("HAProxy", fault) for fault in FAULTS),
    *(("Envoy", fault) for fault in ("killed", "paused", "parted_from_proxy")),
]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def s3(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(network.address) as running:
        fill(running, tmp_path_factory.mktemp("models"))
        yield running


@pytest.fixture(scope="module")
def running(
    network: Network, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), s3, network) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Iterator[Fleet]:
    """Whole again after the test."""
    yield running
    running.restore()


def replay(url: str) -> dict[str, set[str]]:
    """The texts of each model of the trace."""
    texts: dict[str, set[str]] = {}
    with requests.Session() as session:
        for number in TRACE:
            answer = session.post(f"{url}/predictions/{model(number)}", json=SHORT, timeout=90)
            texts.setdefault(model(number), set()).add(text(answer))
    return texts


def test_three_servers_have_the_hits_of_one_three_times_as_large(
    fleet: Fleet, s3: S3Server, tmp_path: Path
) -> None:
    with (
        Server(tmp_path, None, environment(s3, 3 * FITTING)) as large,
        ThreadPoolExecutor(2) as pool,
    ):
        texts, of_three = pool.map(replay, [large.url(""), fleet.proxy.url("")])
        made = [loads(large), sum(loads(server) for server in fleet.nodes.values())]
    one, three = (1 - count / REQUESTS for count in made)
    print(f"hits: one large server {one:.3f}, three small ones {three:.3f}")
    assert 0.5 < one < 1
    assert three >= 0.95 * one
    assert texts == of_three
    assert len(set(map(frozenset, texts.values()))) == len(texts) > 30
    assert all(len(each) == 1 for each in texts.values())


@pytest.fixture(scope="module")
def put(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Put:
    """Puts a version of a called model into the store."""
    made = archives(CALLED, tmp_path_factory.mktemp("called") / "archives")
    return lambda name, version: s3.put(f"{name}.tar.gz", made[name, version].read_bytes())


@pytest.fixture(scope="module")
def texts(running: Fleet, put: Put) -> dict[str, str]:
    server = running.nodes["node1"]
    for name in running.loaded("node1"):  # a load by hand makes no room
        running.unload("node1", name)
    versions = [(name, v) for name in CALLED.all for v in range(CALLED.versions_of(name))]
    ports = (server.port, server.management_port)
    return learn_texts(Clients(ports, CALLED, 0, 0, put, host=server.host), put, versions)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "fault"),
    [pytest.param(*case, marks=needs_envoy if case[0] == "Envoy" else ()) for case in CASES],
)
def test_no_answer_is_wrong_and_none_is_lost(
    fleet: Fleet, put: Put, texts: dict[str, str], kind: str, fault: str, seed: int
) -> None:
    number = len(CASES) * seed + CASES.index((kind, fault))  # its requests have names of their own
    with fleet.behind_envoy() if kind == "Envoy" else contextlib.nullcontext():
        survive(fleet, put, texts, fault, random.Random(seed), number)  # noqa: S311


def survive(
    fleet: Fleet,
    put: Put,
    texts: dict[str, str],
    fault: str,
    chance: random.Random,
    seed: int,
) -> None:
    proxy, began = fleet.proxy, time.monotonic()
    clients = Clients((proxy.port, 0), CALLED, seed, CLIENTS, put, CALLS, PAUSE_S, host=proxy.host)
    clients.ops = clients.first_versions(began)
    for name in CALLED.all:
        put(name, 0)
    for node in fleet.nodes:
        fleet.unload(node, HOT)

    def wait_for_more() -> None:
        enough = len(clients.ops) + MORE
        eventually(lambda: len(clients.ops) >= enough)

    clients.start()
    try:
        wait_for_more()
        at = time.monotonic()
        with FAULTS[fault](fleet, clients, chance):
            begun = time.monotonic()
            wait_for_more()
        fleet.proxy.wait_for(*fleet.nodes)
        wait_for_more()
    finally:
        clients.stop()
    ops = sorted(clients.ops, key=lambda op: op.begin)
    history = History(seed, False, 60, 120, texts, began, ops)
    # A server's log is not checked: the proxy retries on another.
    history.lines = {op.id: 1 for op in ops}
    cut = {
        op.id
        for op in ops
        if fault in CUTS_STREAMS and op.first_s and not op.hung_up and op.status in (0, 503)
    }
    # Envoy draws five times at most for a server that a call has not been to: one name in some 250
    # finds none, and gets Envoy's own 503 until the dead server is noticed.
    drawn = {
        op.id
        for op in ops
        if fault == "killed" and isinstance(proxy, Envoy) and op.lost.startswith("JSONDecodeError")
    }
    counts = Counter(op.status for op in ops if op.kind != PUT and not op.hung_up)
    longest_s = max(op.end - op.begin for op in ops)
    print(f"{fault}: {dict(counts)}, {len(cut)} streams cut, in force after {begun - at:.1f} s,")
    print(f"    the longest call {longest_s:.1f} s, {len(drawn)} answered by Envoy")
    assert len(drawn) <= len(ops) / 100
    assert [v for v in check(history, HEAL) if not v.op or v.op.id not in cut | drawn] == []
