"""Three servers behind HAProxy: as good as one three times as large, and better when one ends."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from benchmarks.switching.trace import Kind, trace
from tests.e2e.server import eventually
from tests.e2e.stores import SHORT, text
from tests.fleet.fleet import MODELS, ROOM, Clients, Fleet, fill, loads, model, node, stopping
from tests.fleet.haproxy import needs_haproxy
from tests.serving.store.s3 import S3Server, s3_server

pytestmark = [needs_haproxy, pytest.mark.slow]

REQUESTS, NAMES = 160, 300
ASKED = trace(36, Kind(bursts=0, scans=0, moves=False), MODELS, REQUESTS)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server() as running:
        fill(running, tmp_path_factory.mktemp("models"))
        yield running


@pytest.fixture(scope="module")
def fleet(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(tmp_path_factory.mktemp("fleet"), s3)
    yield running
    running.stop()


@pytest.fixture
def restored(fleet: Fleet) -> Iterator[Fleet]:
    """Whole again after the test, whatever it was that failed."""
    yield fleet
    fleet.restore()


def replay(url: str) -> dict[str, set[str]]:
    """The texts of each model in what the trace asks for."""
    texts: dict[str, set[str]] = {}
    with requests.Session() as session:
        for number in ASKED:
            answer = session.post(f"{url}/predictions/{model(number)}", json=SHORT, timeout=90)
            texts.setdefault(model(number), set()).add(text(answer))
    return texts


@pytest.fixture(scope="module")
def replayed(
    fleet: Fleet, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, set[str]], list[float]]:
    """Each model's texts, and the share of requests that found their model loaded, by one large
    server and by the fleet."""
    large = node(tmp_path_factory.mktemp("large"), s3, 3 * ROOM)
    with stopping(large), ThreadPoolExecutor(2) as pool:
        large.wait_until_ready()
        one, three = pool.map(replay, [large.url(""), fleet.proxy.url("")])
        made = [loads(large), sum(loads(server) for server in fleet.nodes.values())]
    for name, texts in three.items():
        one[name] |= texts
    return one, [1 - count / REQUESTS for count in made]


@pytest.fixture(scope="module")
def expected(replayed: tuple[dict[str, set[str]], list[float]]) -> dict[str, str]:
    assert all(len(texts) == 1 for texts in replayed[0].values())
    return {name: next(iter(texts)) for name, texts in replayed[0].items()}


def test_three_find_a_model_loaded_as_often_as_one_three_times_as_large(
    replayed: tuple[dict[str, set[str]], list[float]], expected: dict[str, str]
) -> None:
    one, three = replayed[1]
    print(f"hits: one large server {one:.3f}, three small ones {three:.3f}")
    assert 0.5 < one < 1
    assert three >= 0.95 * one
    assert len(set(expected.values())) == len(expected) > 30


def test_of_a_killed_server_only_its_share_moves_and_no_answer_is_lost(
    restored: Fleet, expected: dict[str, str]
) -> None:
    fleet = restored
    before = fleet.shares(NAMES)
    with Clients(fleet.proxy, expected, ASKED, streams=4) as clients:
        clients.wait_for_more(32)
        with fleet.stream() as (victim, lines):
            killed = time.monotonic()
            fleet.kill(victim)
            with pytest.raises(requests.exceptions.ChunkedEncodingError):
                list(lines)
        fleet.proxy.wait_for(*fleet.nodes.keys() - {victim})
        noticed_s = time.monotonic() - killed
        clients.wait_for_more(32)
    without = fleet.shares(NAMES)
    with Clients(fleet.proxy, expected, ASKED) as later:
        fleet.start(victim)
        later.wait_for_more(16)
        fleet.proxy.wait_for(*fleet.nodes)
        later.wait_for_more(32)
    print(f"killed: {clients.answers}, streams that had begun: {clients.begun}, noticed after")
    print(f"{noticed_s:.1f} s, longest answer {clients.longest_s:.1f} s; back: {later.answers}")
    assert set(clients.answers) == set(later.answers) == {200}
    moved = {name for name, server in before.items() if without[name] != server}
    assert moved == {name for name, server in before.items() if server == victim}
    assert 0 < len(moved) <= NAMES * (1 / 3 + 0.05)
    assert fleet.shares(NAMES) == before


def test_an_engine_that_is_killed_ends_its_streams_with_an_error_and_loses_no_answer(
    fleet: Fleet, expected: dict[str, str]
) -> None:
    with Clients(fleet.proxy, expected, ASKED, streams=4) as clients:
        clients.wait_for_more(32)
        with fleet.stream() as (victim, lines):
            fleet.nodes[victim].descendants("-m engine ")[0].kill()
            last = [line for line in lines if line][-1]
        clients.wait_for_more(64)
    print(f"engine killed: {clients.answers}, streams that had begun: {clients.begun}")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 503
    assert set(clients.answers) == {200}
    assert not clients.begun["cut off"]


def test_a_hot_model_spills_over_to_a_second_server(fleet: Fleet, expected: dict[str, str]) -> None:
    hot = ASKED[0]
    mix = [number if turn % 5 == 0 else hot for turn, number in enumerate(ASKED)]
    with Clients(fleet.proxy, expected, mix) as clients:
        eventually(
            lambda: len({server for name, server in clients.served if name == model(hot)}) > 1
        )
        clients.wait_for_more(96)
    asked = Counter[str]()
    for (name, server), count in clients.served.items():
        if name == model(hot):
            asked[server] += count
    print(f"the hot model's requests by server: {asked}")
    assert set(clients.answers) == {200}
    assert max(asked.values()) < 0.9 * asked.total()


def test_a_server_that_is_told_to_stop_fails_nobody(fleet: Fleet, expected: dict[str, str]) -> None:
    with Clients(fleet.proxy, expected, ASKED, streams=4) as clients:
        clients.wait_for_more(32)
        assert fleet.nodes["node3"].stop() == 0
        fleet.proxy.wait_for("node1", "node2")
        clients.wait_for_more(32)
    assert set(clients.answers) == {200}
    assert not clients.begun
