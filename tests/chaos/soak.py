"""A soak: samples what the server's processes and folders hold, and reports what grows."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from command.tables import ms, percent, table
from serving.mms.leftovers import unix_sockets
from testbed import machine, process_tree
from tests.chaos.clients import Models
from tests.chaos.history import PUT, History
from tests.chaos.plan import Plan
from tests.chaos.run import Result, Size
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
# Files and threads are without those of the connections from Multi Model Server to workers, whose
# number depends on the load: sixteen for a model with concurrent requests in the last half minute,
# and Java keeps the thread of a closed one for a minute.
KEYS = ("rss", "pss", "files_open", "threads", "processes", "sockets", "files", "log_bytes")


def plan(seed: int, minutes: float) -> Plan:
    """A fault a minute."""
    drawn = Plan.draw(seed, 60 * minutes, 60.0, FAULTS)
    return Plan(seed, drawn.seconds, False, drawn.faults)


def size(clients: int, models: int, heal: float, pause_s: float) -> Size:
    """So many tiny models, and a tenth as many full-size ones, each tenth of the steady ones."""
    names = tuple(f"시-{number}" for number in range(models))
    moving, full = (max(models * share // MODELS, 1) for share in (MOVING, FULL))
    large = tuple(f"대-{number}" for number in range(full))
    steady = list(names[moving:])
    for place, name in enumerate(large, 1):
        steady.insert(10 * place - 1, name)
    chosen = Models(tuple(steady), names[:moving], 2, zipf=1.0, full=large)
    memory_mib = max(MEMORY_MIB * models // MODELS, 3) + max(full // 5, 1) * FULL_MIB
    return Size(clients, chosen, MIX, memory_mib, True, heal, pause_s, "", REQUEST_S, LOAD_S)


@dataclass(frozen=True)
class Sample:
    """`at_s`: after the first one. Bytes, and counts."""

    at_s: float
    rss: int
    pss: int
    files_open: int
    threads: int
    processes: int
    sockets: int
    files: int
    log_bytes: int
    connections: int
    pooled: int  # threads


class Samples:
    """A context manager that takes a sample each `SAMPLE_S`."""

    def __init__(self, system: System) -> None:
        self.all: list[Sample] = []
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

    def _sample(self) -> Sample:
        system = self._system
        memory = process_tree.memory(system.pid)
        open_files = threads = 0
        for process in process_tree.processes(system.pid):
            with contextlib.suppress(psutil.Error):
                open_files += process.num_fds()
                threads += process.num_threads()
        sockets = len(list(system.run_dir.glob(".mms.sock.*")))
        connections = sum(
            path.startswith(f"{system.run_dir}/.mms.sock.") and not listens
            for path, listens in unix_sockets()
        )
        pooled = sum(_pooled(java.pid) for java in system.processes("java"))
        return Sample(
            time.monotonic() - self._began,
            memory["rss"],
            memory["pss"],
            open_files - 2 * connections,  # its ends
            threads - pooled,
            memory["processes"],
            sockets,
            len(system.files()),
            system.log.stat().st_size,
            connections,
            pooled,
        )


def _pooled(java: int) -> int:
    """Multi Model Server's threads for connections and for what workers write: W-9000-model-1."""
    count = 0
    for name in Path(f"/proc/{java}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            count += name.read_text(encoding="utf-8").startswith("W-")
    return count


def judged(samples: Sequence[Sample], history: History) -> dict[str, Any]:
    """The growth of each from the sixth after the warm-up to the last sixth."""
    last_s = samples[-1].at_s
    part_s = WARM_UP * last_s
    first = [s for s in samples if part_s <= s.at_s < 2 * part_s] or samples[:1]
    last = [s for s in samples if s.at_s >= last_s - part_s] or samples[-1:]
    found: dict[str, Any] = {}
    for key in KEYS[:-1]:
        before, after = (statistics.median(getattr(s, key) for s in part) for part in (first, last))
        found[key] = {"first": before, "last": after, "drift": after / max(before, 1) - 1}
    answered = sum(op.status > 0 for op in history.ops)
    found["log_bytes_a_request"] = (samples[-1].log_bytes - samples[0].log_bytes) / max(answered, 1)
    found["first_token_p99_s"] = dict(_first_tokens(history, part_s))
    return found


def _first_tokens(history: History, part_s: float) -> Iterator[tuple[str, float]]:
    ops = [op for op in history.ops if op.status == 200 and op.first_s is not None]
    if not ops:
        return
    began, ended = ops[0].begin, ops[-1].begin
    for name, start, stop in (
        ("first", began + part_s, began + 2 * part_s),
        ("last", ended - part_s, ended),
    ):
        seconds = [op.first_s for op in ops if start <= op.begin <= stop and op.first_s is not None]
        if len(seconds) > 1:
            yield name, statistics.quantiles(seconds, n=100)[98]


def results(samples: Samples, result: Result, commit: str) -> dict[str, Any]:
    history = result.history
    return {
        "commit": commit,
        "machine": machine.describe(),
        "seconds": samples.all[-1].at_s,
        "requests": sum(op.kind != PUT for op in history.ops),
        "violations": [f"{violation.rule}: {violation.message}" for violation in result.violations],
        "left": history.left,
        "empty": history.empty,
        "faults": [fault.kind for fault in history.faults],
        "judged": judged(samples.all, history),
        "samples": [asdict(sample) for sample in samples.all],
    }


def grown(judged: dict[str, Any]) -> list[str]:
    """What has grown too much."""
    found = [key for key in KEYS[:-1] if judged[key]["drift"] > DRIFT]
    first, last = _p99(judged)
    return [*found, P99] if last > first * (1 + P99_DRIFT) else found


def _p99(judged: dict[str, Any]) -> tuple[float, float]:
    """In seconds; 0 without streams."""
    first, last = (judged["first_token_p99_s"].get(part, 0) for part in ("first", "last"))
    return first, last


def lines(results: dict[str, Any]) -> list[str]:
    """A table of the drifts."""
    judged = results["judged"]
    much = dict.fromkeys(grown(judged), "too much")
    rows = []
    for key in KEYS[:-1]:
        one = judged[key]
        values = f"{one['first']:,.0f}", f"{one['last']:,.0f}", percent(one["drift"])
        rows.append([key, *values, much.get(key, "")])
    first, last = _p99(judged)
    if first and last:
        rows.append([P99, ms(first), ms(last), percent(last / first - 1), much.get(P99, "")])
    found = [table(["", "after the warm-up", "at the end", "drift", ""], rows)]
    found.append(f"log bytes a request: {judged['log_bytes_a_request']:.0f}")
    return found
