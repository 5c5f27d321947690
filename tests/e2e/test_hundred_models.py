"""Many models, little room, many clients: each model answers as it does alone, however long."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testbed.trace import Kind, trace
from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, packed, serving, small, statistics, text
from tests.engine.models import make_artifact
from tests.processes import zombies_below

pytestmark = pytest.mark.slow

MODELS, ROOM, REQUESTS = 100, 20, 160
MEMORY_MIB = 9  # for ROOM of them, and a request's whole context
FEW, ROOM_OF_FEW, WARM_UP, CHURN = 12, 5, 16, 48  # of `small`, in as much memory; requests
CLIENTS = 8


def alone(server: Server, count: int, clients: int) -> list[str]:
    """The first text of each model."""
    with ThreadPoolExecutor(clients) as pool:
        answers = pool.map(lambda number: server.predict(f"m{number}", SHORT), range(count))
        return [text(answer) for answer in answers]


def replay(server: Server, asked: Sequence[int], expected: list[str]) -> Counter[int | str]:
    """Asks for all of them, by some clients at once; counts the answers by their status, or as
    `wrong`."""

    def outcome(number: int) -> int | str:
        answer = server.predict(f"m{number}", SHORT)
        right = answer.status_code != 200 or text(answer) == expected[number]
        return answer.status_code if right else "wrong"

    with ThreadPoolExecutor(CLIENTS) as pool:
        return Counter(pool.map(outcome, asked))


def unload_all(server: Server) -> None:
    for name in server.loaded():
        assert server.unload(name).status_code == 200
    assert statistics(server)["weight_bytes"] == 0


def test_a_hundred_models_in_the_room_of_twenty_answer_as_each_does_alone(tmp_path: Path) -> None:
    """A fifth of the models fit, as of full-size ones in a container of 4 GiB."""
    for number in range(MODELS):
        path = tmp_path / "store" / f"m{number}"
        make_artifact(path, units=64, vocab=160, max_length=64, seed=number)
    with serving(
        tmp_path / "server", tmp_path / "store", ENGINE_MEMORY_MIB=str(MEMORY_MIB)
    ) as server:
        expected = alone(server, MODELS, 2)
        assert len(set(expected)) > MODELS / 2
        room = statistics(server)
        held = [model["reserved_bytes"] for model in room["models"]]
        assert ROOM - 2 <= room["budget_bytes"] / max(held) <= ROOM + 2

        asked = trace(0, Kind(), MODELS, REQUESTS)
        assert replay(server, asked, expected) == {200: REQUESTS}

        after = statistics(server)
        assert after["weight_bytes"] <= after["budget_bytes"]
        hot = [model for model in after["models"] if model["residency"] == "hot"]
        assert 1 < len(hot) <= ROOM
        unload_all(server)


def held(server: Server) -> tuple[int, int, int]:
    """Open files of the gateway and of the engine, and the gateway's memory in bytes."""
    gateway = server.descendants("serving.gateway")[0]
    engine = server.descendants("-m engine ")[0]
    return gateway.num_fds(), engine.num_fds(), gateway.memory_info().rss


def test_models_that_are_loaded_and_evicted_over_and_over_leave_nothing(tmp_path: Path) -> None:
    """The gateway evicts here, since the engine holds no more models than fit."""
    store = tmp_path / "store"
    for seed in range(FEW):
        if seed % 2:
            packed(small(tmp_path / "unpacked" / f"m{seed}", seed), store / f"m{seed}.tar.gz")
        else:
            small(store / f"m{seed}", seed)
    limits = {"ENGINE_MEMORY_MIB": str(MEMORY_MIB), "ENGINE_OVERCOMMIT": "1"}
    with serving(tmp_path / "server", store, **limits) as server:
        expected = alone(server, FEW, 1)
        assert len(set(expected)) == FEW
        asked = random.Random(0).choices(range(FEW), k=WARM_UP + CHURN)  # noqa: S311
        assert replay(server, asked[:WARM_UP], expected) == {200: WARM_UP}
        files, engine_files, memory = held(server)
        assert replay(server, asked[WARM_UP:], expected) == {200: CHURN}

        count = len(server.loaded())
        assert count <= ROOM_OF_FEW
        eventually(lambda: len(statistics(server)["models"]) == count)
        eventually(lambda: len(server.descendants("model_service_worker")) == count)
        eventually(lambda: len(list(server.run_dir.glob(".mms.sock.*"))) <= count + 1)
        assert len(list(server.run_dir.glob("workers/*"))) == count
        after = held(server)
        assert after[0] <= files + 10
        assert after[1] <= engine_files + 30
        assert after[2] < memory + (48 << 20)
        unload_all(server)
        eventually(lambda: not server.descendants("model_service_worker"))
        eventually(lambda: not zombies_below(server.process.pid))
