"""Many models, little room, many clients: for as long as it goes on, nothing goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, packed, serving, small, statistics, text
from tests.processes import zombies_below

pytestmark = pytest.mark.slow

MODELS, ROOM, CLIENTS = 12, 5, 8
WARM_UP, CHURN = 2, 6  # calls of each client


def churn(server: Server, expected: dict[str, str], calls: int) -> Counter[int | str]:
    """What the answers were: their status, or `wrong`."""

    def client(seed: int) -> Counter[int | str]:
        chance, seen = random.Random(seed), Counter[int | str]()  # noqa: S311
        with requests.Session() as session:
            for _ in range(calls):
                name = chance.choice(list(expected))
                url = server.url(f"/predictions/{name}")
                answer = session.post(url, json=SHORT, timeout=60)
                right = answer.status_code != 200 or text(answer) == expected[name]
                seen[answer.status_code if right else "wrong"] += 1
        return seen

    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(client, range(CLIENTS)), Counter[int | str]())


def held(server: Server) -> tuple[int, int, int]:
    """Open files of the gateway and of the engine, and the gateway's memory in bytes."""
    gateway = server.descendants("serving.gateway")[0]
    engine = server.descendants("-m engine ")[0]
    return gateway.num_fds(), engine.num_fds(), gateway.memory_info().rss


def test_twelve_models_in_the_room_of_five_answer_as_each_does_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for seed in range(MODELS):
        if seed % 2:
            packed(small(tmp_path / "unpacked" / f"m{seed}", seed), store / f"m{seed}.tar.gz")
        else:
            small(store / f"m{seed}", seed)
    with serving(
        tmp_path / "server", store, ENGINE_MEMORY_MIB="9", ENGINE_OVERCOMMIT="1"
    ) as server:
        expected = {f"m{i}": text(server.predict(f"m{i}", SHORT)) for i in range(MODELS)}
        assert len(set(expected.values())) == MODELS
        assert set(churn(server, expected, WARM_UP)) == {200}
        files, engine_files, memory = held(server)

        assert churn(server, expected, CHURN) == {200: CLIENTS * CHURN}

        loaded = server.get("/models").json()["models"]
        assert len(loaded) <= ROOM
        eventually(lambda: len(statistics(server)["models"]) == len(loaded))
        eventually(lambda: len(server.descendants("model_service_worker")) == len(loaded))
        eventually(lambda: len(list(server.run_dir.glob(".mms.sock.*"))) <= len(loaded) + 1)
        assert len(list(server.run_dir.glob("workers/*"))) == len(loaded)
        after = held(server)
        assert after[0] <= files + 10
        assert after[1] <= engine_files + 30
        assert after[2] < memory + (48 << 20)

        for model in loaded:
            assert server.unload(model["modelName"]).status_code == 200
        assert statistics(server)["weight_bytes"] == 0
        eventually(lambda: not server.descendants("model_service_worker"))
        eventually(lambda: not zombies_below(server.process.pid))
