"""The container's memory, as its control group counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """`used_bytes` is without the page cache, which the kernel gives back before it kills."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


def container_memory(cgroup: Path = CGROUP) -> Memory | None:
    """None where nothing limits it, or nothing says so."""
    version_2 = (cgroup / "memory.max").exists()
    folder = cgroup if version_2 else cgroup / "memory"
    limit, usage = (
        ("memory.max", "memory.current")
        if version_2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version_2 else "total_"
    try:
        limit_bytes = int((folder / limit).read_text())
        used_bytes = int((folder / usage).read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        counts = {name: int(value) for name, value in rows}
    except (OSError, ValueError):  # absent, or "max"
        return None
    cached = counts[f"{prefix}inactive_file"] + counts[f"{prefix}active_file"]
    return Memory(limit_bytes, used_bytes - cached)
