"""A soak: samples what the server's processes and folders hold, and reports what grows."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from command.tables import percent, table
from serving.mms.leftovers import unix_sockets
from testbed import process_tree
from tests.chaos.clients import Models
from tests.chaos.history import PUT, History
from tests.chaos.plan import Plan
from tests.chaos.run import Size
from tests.chaos.system import System

MODELS, MOVING, FULL = 100, 10, 10
# Memory for a fifth: of tiny models of 0.45 MB, and of full-size ones with a row of keys.
MEMORY_MIB, FULL_MIB = 9, 475 + 73
REQUEST_S = 120  # some wait until two full-size models before them have answered
LOAD_S = 900  # a full-size model that is prepared for the first time, on a busy machine
SAMPLE_S = 10.0
WARM_UP = 1 / 6  # of the whole: the first ten minutes of an hour
DRIFT, P99_DRIFT = 0.05, 0.10
P99 = "first token p99 ms"
MIX = {"predictions": 60, "predictions-stream": 40, PUT: 1}
# Kinds of faults that leave the machine as it was; what is killed begins again with less.
FAULTS = ("kill worker", "kill host", "store 503", "store change", "store truncate", "stop engine")


def plan(seed: int, minutes: float) -> Plan:
    """A fault a minute."""
    drawn = Plan.draw(seed, 60 * minutes, 60.0, FAULTS)
    return Plan(seed, drawn.seconds, False, drawn.faults)


def size(clients: int, heal: float) -> Size:
    """So many tiny models, and a tenth as many full-size ones, each tenth of the steady ones."""
    names = tuple(f"시-{number}" for number in range(MODELS))
    large = tuple(f"대-{number}" for number in range(FULL))
    steady = list(names[MOVING:])
    for place, name in enumerate(large, 1):
        steady.insert(10 * place - 1, name)
    chosen = Models(tuple(steady), names[:MOVING], 2, zipf=1.0, full=large)
    memory_mib = MEMORY_MIB + FULL // 5 * FULL_MIB
    return Size(clients, chosen, MIX, memory_mib, heal, "", REQUEST_S, LOAD_S)


class Samples:
    """A context manager that takes a sample each `SAMPLE_S`: bytes and counts by name, and `at_s`,
    the time since it was made."""

    def __init__(self, system: System) -> None:
        self.all: list[dict[str, float]] = []
        self._system, self._began = system, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Samples:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(OSError, psutil.Error):  # a process that has just ended
                self.all.append(self._sample())

    def _sample(self) -> dict[str, float]:
        """Files and threads are without those of the connections from Multi Model Server to
        workers, whose number depends on the load: sixteen for a model with concurrent requests in
        the last half minute, and Java keeps the thread of a closed one for a minute."""
        system = self._system
        memory = process_tree.memory(system.pid)
        open_files = threads = 0
        for process in process_tree.processes(system.pid):
            with contextlib.suppress(psutil.Error):
                open_files += process.num_fds()
                threads += process.num_threads()
        connections = sum(
            path.startswith(f"{system.run_dir}/.mms.sock.") and not listens
            for path, listens in unix_sockets()
        )
        return {
            "at_s": time.monotonic() - self._began,
            "rss": memory["rss"],
            "pss": memory["pss"],
            "files_open": open_files - 2 * connections,  # its ends
            "threads": threads - sum(_pooled(java.pid) for java in system.processes("java")),
            "processes": memory["processes"],
            "sockets": len(list(system.run_dir.glob(".mms.sock.*"))),
            "files": len(system.files()),
        }


def _pooled(java: int) -> int:
    """Multi Model Server's threads for connections and for what workers write: W-9000-model-1."""
    count = 0
    for name in Path(f"/proc/{java}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            count += name.read_text(encoding="utf-8").startswith("W-")
    return count


def judged(samples: Sequence[Mapping[str, float]], history: History) -> dict[str, list[float]]:
    """Each value in the sixth after the warm-up and in the last sixth: medians, and the 99th
    percentile of the time to the first token."""
    last_s = samples[-1]["at_s"]
    part_s = WARM_UP * last_s
    parts = (
        [s for s in samples if part_s <= s["at_s"] < 2 * part_s] or samples[:1],
        [s for s in samples if s["at_s"] >= last_s - part_s] or samples[-1:],
    )
    found = {
        key: [statistics.median(sample[key] for sample in part) for part in parts]
        for key in samples[0]
        if key != "at_s"
    }
    streams = [op for op in history.ops if op.status == 200 and op.first_s is not None]
    if streams:
        began, ended = streams[0].begin, streams[-1].begin
        found[P99] = []
        for start, stop in ((began + part_s, began + 2 * part_s), (ended - part_s, ended)):
            seconds = [op.first_s or 0 for op in streams if start <= op.begin <= stop]
            found[P99].append(1000 * statistics.quantiles(seconds or [0], n=100)[98])
    return found


def drift(values: Sequence[float]) -> float:
    return values[1] / max(values[0], 1) - 1


def grown(judged: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the measurements that have grown too much."""
    return [
        key
        for key, values in judged.items()
        if drift(values) > (P99_DRIFT if key == P99 else DRIFT)
    ]


def lines(judged: Mapping[str, Sequence[float]]) -> str:
    """A table of the drifts."""
    much = grown(judged)
    rows = [
        [key, *(f"{v:,.0f}" for v in values), percent(drift(values)), "too much" * (key in much)]
        for key, values in judged.items()
    ]
    return table(["", "after the warm-up", "at the end", "drift", ""], rows)
