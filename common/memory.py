"""Reads how much memory the container, by its control group, or the machine has."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """A container's memory; `used_bytes` excludes the page cache, which the kernel can evict."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


def container_memory(cgroup: Path = CGROUP) -> Memory | None:
    """Read the container's memory from its control group; None if it shows no limit."""
    folder, limit, usage, prefix = cgroup, "memory.max", "memory.current", ""
    if not (folder / limit).exists():  # control groups of version 1
        folder, prefix = cgroup / "memory", "total_"
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
    try:
        limit_bytes = int((folder / limit).read_text())
        used_bytes = int((folder / usage).read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        counts = {name: int(value) for name, value in rows}
    except (OSError, ValueError):  # the file is absent, or holds "max"
        return None
    cached = counts[f"{prefix}inactive_file"] + counts[f"{prefix}active_file"]
    return Memory(limit_bytes, used_bytes - cached)


def memory_limit_bytes() -> int:
    """Return the container's memory limit or the machine's memory, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = container_memory()
    return total if container is None else min(total, container.limit_bytes)


# Parts of the out-of-memory messages of onnxruntime, its arena, MXNet, CUDA and cuBLAS. "alloc" or
# "memory" would also match names of source files and "an illegal memory access".
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
    """Return whether a library's error message reports that memory ran out."""
    return any(message in text.lower() for message in OUT_OF_MEMORY)


def return_freed_memory() -> None:
    """Return freed heap pages to the operating system, which glibc does not do itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
