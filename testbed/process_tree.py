"""Memory, disk reads and processor time of all processes of a server together."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil

# (word of the command line, kind); the first match counts. "texts" are tokenizer processes.
KINDS = (
    ("java", "MMS"),
    ("model_service_worker", "workers"),
    ("handlers", "workers"),
    ("serving.gateway", "gateway"),
    ("engine.sandbox", "texts"),
    ("engine", "engine"),
)

SIZES = {"rss": "Rss", "pss": "Pss", "anonymous": "Pss_Anon"}  # names of ours and the kernel's


def rollup(pid: int) -> dict[str, int]:
    """Return a process's memory in bytes by the kernel's names, as Rss. Raises `OSError`."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    return {key: int(rest.split()[0]) * 1024 for key, _, rest in (x.partition(":") for x in lines)}


def processes(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants; [] if the process has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kind_of(command: str) -> str:
    return next((kind for word, kind in KINDS if word in command), "others")


def memory(pid: int) -> dict[str, Any]:
    """Sum RSS, PSS and anonymous PSS, in bytes, of a process and its descendants, also by kind."""
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for process in processes(pid):
        try:
            sizes = rollup(process.pid)
            kind = kind_of(" ".join(process.cmdline()))
        except (OSError, psutil.Error):  # the process has just ended
            continue
        kinds[kind].update({key: sizes[name] for key, name in SIZES.items()}, processes=1)
    keys = (*SIZES, "processes")
    return {key: sum(k[key] for k in kinds.values()) for key in keys} | {"by_kind": kinds}


def usage(pid: int) -> Counter[str]:
    """Sum major faults, bytes read from the disk, and CPU seconds of a process tree.

    Ended processes count only for CPU seconds, which include those of ended children.
    """
    results: Counter[str] = Counter(major_faults=0, read_bytes=0)
    for process in processes(pid):
        try:
            # After the name in brackets: field 3 of proc(5) is the first.
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
            results["major_faults"] += int(stat.rpartition(")")[2].split()[9])
            results["read_bytes"] += int(process.io_counters().read_bytes)
            results["cpu_s"] += sum(process.cpu_times()[:4])
        except (OSError, psutil.Error):
            continue
    return results


def each_further(before: dict[str, Any], after: dict[str, Any], models: int) -> dict[str, Any]:
    """Return the mean growth of `memory` per model, in bytes, by kind of process."""
    return {
        kind: {
            key: (counts[key] - before["by_kind"].get(kind, {}).get(key, 0)) / max(models, 1)
            for key in SIZES
        }
        for kind, counts in after["by_kind"].items()
    }
