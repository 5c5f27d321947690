"""Whether a model that its own worker holds fits into what the container has left."""

from __future__ import annotations

from pathlib import Path

from common.errors import NeverFits, OutOfMemory
from common.memory import MIB, container_memory, memory_limit_bytes

MEMINFO = Path("/proc/meminfo")
# What the others shall keep: the gateway's buffers, the JVM's heap as it fills.
RESERVE_BYTES = 128 * MIB


def check_memory(size_bytes: int, what: str) -> None:
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
    """What is left of the container's limit, and of the machine's memory."""
    left, container = _meminfo("MemAvailable"), container_memory()
    return left if container is None else min(left, container.free_bytes)


def _meminfo(field: str) -> int:
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return memory_limit_bytes()
