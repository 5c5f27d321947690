"""What a server's processes hold and have read, all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

KINDS = (
    ("java", "MMS"),
    ("model_service_worker", "workers"),
    ("handlers", "workers"),
    ("serving.gateway", "gateway"),
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


def page_ins(pid: int) -> dict[str, int]:
    """Major faults and bytes that came from the disk, of the processes that live."""
    faults = read = 0
    for process in processes(pid):
        try:
            # After the name in brackets: field 12 of proc(5) is the tenth.
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
            faults += int(stat.rpartition(")")[2].split()[9])
            read += int(process.io_counters().read_bytes)
        except (OSError, psutil.Error):
            continue
    return {"major_faults": faults, "read_bytes": read}


def _kind(command: str) -> str:
    return next((kind for word, kind in KINDS if word in command), "others")


def _numbers(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="ascii").splitlines()[1:]
    return {key: int(rest.split()[0]) * 1024 for key, _, rest in (x.partition(":") for x in lines)}
