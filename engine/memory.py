"""The memory budget: what may be loaded and what may run, decided before anything is allocated."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from engine.errors import NeverFits, OutOfMemory

MIB = 1 << 20
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)


def memory_limit_bytes() -> int:
    """What this process may use at most: the container's limit, or the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return total


def default_budget_bytes() -> int:
    """The limit less a reserve for the other processes, the libraries and working memory.

    With MXNet and one model these are 560 MiB: 290 of the engine's own, 270 of the others.
    """
    limit = memory_limit_bytes()
    return limit - max(640 * MIB, limit // 4)


def return_freed_memory() -> None:
    """Gives freed heap pages back to the operating system (glibc keeps them otherwise)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Budget:
    """Counts weights and K/V bytes against a total. Safe to use from several threads."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.weight_bytes = 0
        self.kv_bytes = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.weight_bytes - self.kv_bytes

    def reserve_weights(self, size: int, model: str) -> None:
        """Raises what `check_weights` does."""
        with self._lock:
            self.check_weights(size, model)
            self.weight_bytes += size

    def check_weights(self, size: int, model: str) -> None:
        """Raises `OutOfMemory`; `NeverFits` if not even an empty engine had room."""
        if size > self.total_bytes:
            raise NeverFits(
                f"model {model} needs {size / MIB:.0f} MiB, the engine has"
                f" {self.total_bytes / MIB:.0f} MiB in all (ENGINE_MEMORY_MIB sets it)"
            )
        if size > self.free_bytes:
            raise OutOfMemory(self.explain(f"model {model}", size))

    def release_weights(self, size: int) -> None:
        with self._lock:
            self.weight_bytes -= size

    def reserve_kv(self, size: int) -> bool:
        with self._lock:
            if size > self.free_bytes:
                return False
            self.kv_bytes += size
            return True

    def release_kv(self, size: int) -> None:
        with self._lock:
            self.kv_bytes -= size

    def could_hold_kv(self, size: int) -> bool:
        """Whether `size` would fit if nothing else were running."""
        return size <= self.total_bytes - self.weight_bytes

    def explain(self, what: str, size: int) -> str:
        return (
            f"{what} needs {size / MIB:.0f} MiB, but of the engine's"
            f" {self.total_bytes / MIB:.0f} MiB {self.weight_bytes / MIB:.0f} are taken by models"
            f" and {self.kv_bytes / MIB:.0f} by running requests"
        )
