"""What a server's processes hold and have read, all of them together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

TICKS = os.sysconf("SC_CLK_TCK")
# By a word of the command, the first that fits. "texts" are the engine's processes that tokenize.
KINDS = (
    ("java", "MMS"),
    ("model_service_worker", "workers"),
    ("handlers", "workers"),
    ("serving.gateway", "gateway"),
    ("engine.sandbox", "texts"),
    ("engine", "engine"),
)


def processes(pid: int) -> Iterator[psutil.Process]:
    parent = psutil.Process(pid)
    yield parent
    yield from parent.children(recursive=True)


def memory(pid: int) -> dict[str, Any]:
    """Bytes of the process and all below it. `anonymous` is the share of what no file holds."""
    found: dict[str, Any] = {"rss": 0, "pss": 0, "anonymous": 0, "processes": 0, "by_kind": {}}
    for process in processes(pid):
        try:
            rollup = _numbers(Path(f"/proc/{process.pid}/smaps_rollup"))
            kind = _kind(" ".join(process.cmdline()))
        except (OSError, psutil.Error, ValueError):  # it has just ended
            continue
        each = {"rss": rollup["Rss"], "pss": rollup["Pss"], "anonymous": rollup["Pss_Anon"]}
        of_kind = found["by_kind"].setdefault(kind, dict.fromkeys(found.keys() - {"by_kind"}, 0))
        for counts in (found, of_kind):
            counts["processes"] += 1
            for key, value in each.items():
                counts[key] += value
    return found


def usage(pid: int) -> dict[str, float]:
    """Major faults, bytes that came from the disk, and seconds of the processors' time.

    Of the processes that live; the seconds are those of ended children, too.
    """
    found = {"major_faults": 0, "read_bytes": 0, "cpu_s": 0.0}
    for process in processes(pid):
        try:
            # After the name in brackets: field 3 of proc(5) is the first.
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
            fields = stat.rpartition(")")[2].split()
            found["major_faults"] += int(fields[9])
            found["cpu_s"] += sum(map(int, fields[11:15])) / TICKS
            found["read_bytes"] += int(process.io_counters().read_bytes)
        except (OSError, psutil.Error):
            continue
    return found


def _kind(command: str) -> str:
    return next((kind for word, kind in KINDS if word in command), "others")


def _numbers(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="ascii").splitlines()[1:]
    return {key: int(rest.split()[0]) * 1024 for key, _, rest in (x.partition(":") for x in lines)}
