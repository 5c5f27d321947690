"""A hundred models in the room of twenty, as full-size ones are in a container of 4 GiB."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from testbed.trace import Kind, trace
from tests.e2e.server import Server
from tests.e2e.stores import SHORT, serving, statistics, text
from tests.engine.models import make_artifact

pytestmark = pytest.mark.slow

MODELS, ROOM, CLIENTS, REQUESTS = 100, 20, 8, 400
MEMORY_MIB = 9  # for ROOM of them, and a request's whole context


def ask(server: Server, session: requests.Session, number: int) -> requests.Response:
    return session.post(server.url(f"/predictions/m{number}"), json=SHORT, timeout=60)


def replay(server: Server, asked: Sequence[int], expected: dict[int, str]) -> Counter[int | str]:
    """Asks for all of them, by some clients at once: what the answers were, by their status, or
    `wrong`, or `lost`."""
    left, turn = iter(asked), threading.Lock()

    def mine() -> Iterator[int]:
        while True:
            with turn:
                number = next(left, None)
            if number is None:
                return
            yield number

    def client(_: int) -> Counter[int | str]:
        seen = Counter[int | str]()
        with requests.Session() as session:
            for number in mine():
                try:
                    answer = ask(server, session, number)
                except requests.RequestException:
                    seen["lost"] += 1
                    continue
                right = answer.status_code != 200 or text(answer) == expected[number]
                seen[answer.status_code if right else "wrong"] += 1
        return seen

    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(client, range(CLIENTS)), Counter[int | str]())


def test_a_hundred_models_in_the_room_of_twenty_answer_as_each_does_alone(tmp_path: Path) -> None:
    for number in range(MODELS):
        path = tmp_path / "store" / f"m{number}"
        make_artifact(path, units=64, vocab=160, max_length=64, seed=number)
    with serving(
        tmp_path / "server", tmp_path / "store", ENGINE_MEMORY_MIB=str(MEMORY_MIB)
    ) as server:
        with ThreadPoolExecutor(2) as pool, requests.Session() as session:
            answers = pool.map(lambda number: text(ask(server, session, number)), range(MODELS))
            expected = dict(enumerate(answers))
        assert len(set(expected.values())) > MODELS / 2
        room = statistics(server)
        held = [model["reserved_bytes"] for model in room["models"]]
        assert ROOM - 2 <= room["budget_bytes"] / max(held) <= ROOM + 2

        asked = trace(0, Kind(), MODELS, REQUESTS)
        assert replay(server, asked, expected) == {200: REQUESTS}

        after = statistics(server)
        assert after["weight_bytes"] <= after["budget_bytes"]
        hot = [model for model in after["models"] if model["residency"] == "hot"]
        assert 1 < len(hot) <= ROOM
        for model in server.get("/models").json()["models"]:
            assert server.unload(model["modelName"]).status_code == 200
        assert statistics(server)["weight_bytes"] == 0
