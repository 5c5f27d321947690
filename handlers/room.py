"""Whether a model that its own worker holds fits into what the container has left."""

from __future__ import annotations

from pathlib import Path

from engine.errors import NeverFits, OutOfMemory
from engine.memory import MIB, memory_limit_bytes

CGROUP_V2 = Path("/sys/fs/cgroup")
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
MEMINFO = Path("/proc/meminfo")
# What the others shall keep: the gateway's buffers, the JVM's heap as it fills.
RESERVE_BYTES = 128 * MIB


def check_room(size_bytes: int, what: str) -> None:
    """Raises `OutOfMemory` with the numbers, on which the gateway unloads others, where it may;
    `NeverFits` if that could not help."""
    limit, left = memory_limit_bytes() - RESERVE_BYTES, available_bytes() - RESERVE_BYTES
    if size_bytes > left:
        error = NeverFits if size_bytes > limit else OutOfMemory
        raise error(
            f"{what} needs about {size_bytes / MIB:.0f} MiB, but of the container's"
            f" {limit / MIB:.0f} MiB only {max(left, 0) / MIB:.0f} are left"
        )


def available_bytes() -> int:
    """What is left of the container's limit, and of the machine's memory.

    File pages that the kernel can drop count as left.
    """
    left = _meminfo("MemAvailable")
    for folder, limit, used, dropped in (
        (CGROUP_V2, "memory.max", "memory.current", "inactive_file"),
        (CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
            pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # absent, or "max"
            continue
        left = min(left, room + int(pages.get(dropped, 0)))
    return left


def _meminfo(field: str) -> int:
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return memory_limit_bytes()
