"""Measures the time until all models answer again after a kill of each kind of process."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from command.tables import table
from testbed import random_model
from testbed.process import ProgramError
from testbed.server import Server
from tests.chaos.calls import call, request
from tests.chaos.history import Op
from tests.chaos.system import processes_of

MODELS = 5
KINDS = ("worker", "host", "texts", "zygote", "gateway", "engine", "java", "launcher")
# Between two kills, for the processes that end with a killed one.
REST_S = 2.5
GIVE_UP_S = 60.0
PAUSE_S = 0.01


def measure(rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds by kind: in each round a new server loses one process of each kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        models = [*random_model.fine_tunes(Path(folder) / "models", random_model.TINY, MODELS)]
        named = {path.name: path for path in models}
        for number in range(rounds):
            log = Path(folder) / "server.log"
            with Server(models[0].parent, log, named, ("native", "fp32")) as server:
                _all_answer(server, [*named])
                for kind in KINDS:
                    time.sleep(REST_S)
                    found[kind].append(_killed(server, kind, [*named], number))
            last = ", ".join(f"{kind} {values[-1]:.2f}" for kind, values in found.items())
            say(f"{number + 1} of {rounds}: {last}")
    return found


def lines(found: dict[str, list[float]]) -> str:
    rows = [
        [kind, *(f"{value:.2f}" for value in (statistics.median(values), p95(values), max(values)))]
        for kind, values in found.items()
    ]
    return table(["killed", "p50 s", "p95 s", "most s"], rows)


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[18] if values[1:] else values[0]


def _killed(server: Server, kind: str, names: list[str], pick: int) -> float:
    """Seconds from a kill until each model has answered a request that began after it."""
    found = processes_of(server.pid, kind)
    if not found:
        raise ProgramError(f"there is no {kind} to kill")
    found[pick % len(found)].kill()
    began = time.monotonic()
    _all_answer(server, names)
    return time.monotonic() - began


def _all_answer(server: Server, names: list[str]) -> None:
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: _answers(server, name), names))


def _answers(server: Server, name: str) -> None:
    end = time.monotonic() + GIVE_UP_S
    sent = request("predictions", name, "가")
    while time.monotonic() < end:
        op = Op("recovery", 0, "predictions", name, time.monotonic(), 0)
        if call((server.port, server.management_port), sent, op, GIVE_UP_S).status == 200:
            return
        time.sleep(PAUSE_S)
