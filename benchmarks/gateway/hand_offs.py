"""Measured: who hands a request to whom, how long each takes to wake and how long it computes.

The kernel's scheduler says who wakes whom (`perf`, as root). From the moment that a client has its
answer the way is followed back: it was woken by the thread that wrote, which had been woken by the
one before, and so on to the client's own call.
"""

from __future__ import annotations

import bisect
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import BenchmarkError
from benchmarks.report.tables import Row
from benchmarks.switching.process_tree import processes

TOKENS = 16
EVENTS = "sched:sched_switch,sched:sched_wakeup,sched:sched_wakeup_new"
SETTLE_S = 1.0
SWITCH = re.compile(r"prev_pid=(\d+) .*prev_state=(\S+) ==> .*next_pid=(\d+)")
WOKEN = re.compile(r" pid=(\d+) ")
LINE = re.compile(r"\s*(\d+)\s+(\d+)\.(\d{9}):\s+\S*(sched_\w+):(.*)")
# By a word of the command, the first that fits.
KINDS = {
    "serving.gateway": "gateway",
    "handlers.host": "host",
    "ModelServer": "MMS",
    "sandbox": "texts",
    "-m engine": "engine",
}


@dataclass
class Step:
    """Of one thread: from its wake-up until it woke the next; times in ns."""

    thread: int
    wake: int
    computed: int


class Schedule:
    """Who ran when and was woken by whom: lines of `perf script -F tid,time,event,trace`."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._began: dict[int, list[int]] = defaultdict(list)
        self._ended: dict[int, list[tuple[int, bool]]] = defaultdict(list)  # and whether to sleep
        self._woken: dict[int, list[tuple[int, int]]] = defaultdict(list)  # and by whom
        for found in filter(None, map(LINE.match, lines)):
            thread, s, ns, event, rest = found.groups()
            at = int(s) * 10**9 + int(ns)
            if event == "sched_switch" and (switch := SWITCH.search(rest)):
                self._ended[int(switch[1])].append((at, not switch[2].startswith("R")))
                self._began[int(switch[3])].append(at)
            elif woken := WOKEN.search(rest):
                self._woken[int(woken[1])].append((at, int(thread)))
        for times in (self._began, self._ended, self._woken):
            for each in times.values():
                each.sort()

    def way(self, thread: int, began: int, ended: int, known: Iterable[int]) -> list[Step]:
        """Back from `thread` at `ended` until `began`, in the order in which it happened; empty
        where somebody woke it who is not `known`."""
        steps: list[Step] = []
        threads = {*known}
        while thread in threads:
            slept = [at for at, sleeps in self._ended[thread] if sleeps and at < ended]
            woken = self._woken[thread]
            at = bisect.bisect(woken, (slept[-1], 0)) if slept else len(woken)
            if at == len(woken) or woken[at][0] <= began or woken[at][0] > ended:
                computed = self._computed(thread, began, ended)
                return [Step(thread, 0, computed), *reversed(steps)]
            wake, by = woken[at]
            begins = self._began[thread]
            ran = begins[min(bisect.bisect_left(begins, wake), len(begins) - 1)]
            steps.append(Step(thread, ran - wake, self._computed(thread, ran, ended)))
            thread, ended = by, wake
        return []

    def _computed(self, thread: int, begin: int, end: int) -> int:
        """ns on a core."""
        total, at = 0, begin
        ends, begins = self._ended[thread], self._began[thread]
        while at < end:
            i = bisect.bisect_right(ends, (at, True))
            stop = ends[i][0] if i < len(ends) else end
            total += min(stop, end) - at
            j = bisect.bisect_left(begins, stop)
            at = begins[j] if j < len(begins) else end
        return total


def measure(pid: int, ask: Callable[[], Any], count: int, data: Path) -> dict[str, Any]:
    """The way that most of `count` requests took: `{"requests", "of", "steps"}`, each step with
    its `thread`, and medians `wake_us` and `computed_us`. `pid` is the server's."""
    if shutil.which("perf") is None:
        raise BenchmarkError("no perf")
    command: list[str | Path] = [
        "perf",
        "record",
        "-q",
        "-a",
        "-k",
        "mono",
        "-m",
        "4096",
        "-e",
        EVENTS,
        "-o",
        data,
    ]
    recorder = subprocess.Popen(command, stderr=subprocess.PIPE)
    time.sleep(SETTLE_S)
    if recorder.poll() is not None:
        said = recorder.communicate()[1].decode(errors="replace").strip().split("\n")[0]
        raise BenchmarkError(f"perf record: {said}")
    spans = []
    try:
        names = _names(pid)
        for _ in range(count):
            began = time.monotonic_ns()
            ask()
            spans.append((began, time.monotonic_ns()))
    finally:
        recorder.send_signal(signal.SIGINT)
        recorder.communicate()
    script: list[str | Path] = ["perf", "script", "--ns", "-F", "tid,time,event,trace", "-i", data]
    told = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    schedule = Schedule(told.split("\n"))
    client = os.getpid()
    names[client] = "client"
    ways = [way for span in spans if (way := schedule.way(client, *span, names))]
    if not ways:
        raise BenchmarkError("the kernel's scheduler has told no request's way")
    kinds = Counter(tuple(names[step.thread] for step in way) for way in ways)
    most, times = kinds.most_common(1)[0]
    same = [way for way in ways if tuple(names[step.thread] for step in way) == most]
    steps = [
        {
            "thread": thread,
            "wake_us": statistics.median(way[i].wake for way in same) / 1000,
            "computed_us": statistics.median(way[i].computed for way in same) / 1000,
        }
        for i, thread in enumerate(most)
    ]
    return {"requests": times, "of": count, "steps": steps}


def _names(pid: int) -> dict[int, str]:
    """Of the server's threads."""
    found: dict[int, str] = {}
    for process in processes(pid):
        command = " ".join(process.cmdline())
        kind = next((name for word, name in KINDS.items() if word in command), "others")
        for number, thread in enumerate(process.threads()):
            comm = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip()
            name = comm if kind == "MMS" else f"thread {number}" if number else ""
            # Any of the threads that are alike may take a request.
            found[thread.id] = kind if kind == "host" else f"{kind} {name}".strip()
    return found


def rows(found: dict[str, Any]) -> Iterator[Row]:
    """Each step, then what each process does in all, and all of them."""
    steps = [(step["thread"], step["wake_us"], step["computed_us"]) for step in found["steps"]]
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    whole = f"all, {found['requests']} of {found['of']} requests"
    for thread, *times in steps:
        for name in (f"{thread.partition(' ')[0]}, in all", whole):
            sums[name] = [a + b for a, b in zip(sums[name], times, strict=True)]
    sums[whole] = sums.pop(whole)  # last
    for name, wake, computed in [*steps, *((name, *times) for name, times in sums.items())]:
        yield name, f"{wake:.0f}", f"{computed:.0f}"
