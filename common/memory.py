"""What memory there is: the container's, as its control group counts it, or the machine's."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
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


def memory_limit_bytes() -> int:
    """What this process may use at most: the container's limit, or the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = container_memory()
    return total if container is None else min(total, container.limit_bytes)


# What onnxruntime, its arena, MXNet, CUDA and cuBLAS say when memory is short. A mere "alloc" or
# "memory" would not do: sources' names hold them, and so does "an illegal memory access".
OUT_OF_MEMORY = (
    "out of memory",
    "failed to allocate",
    "smaller than requested bytes",
    "status_alloc_failed",
    "bad_alloc",
    "bad allocation",
    "mmap",
)


def is_out_of_memory(text: str) -> bool:
    """Whether a library's error message says that it had no memory."""
    return any(said in text.lower() for said in OUT_OF_MEMORY)


def return_freed_memory() -> None:
    """Gives freed heap pages back to the operating system (glibc keeps them otherwise)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
