"""The memory budget: what may be loaded and what may run, decided before anything is allocated."""

from __future__ import annotations

import ctypes
import os
import threading

from engine.container import container_memory
from engine.errors import NeverFits, OutOfMemory

MIB = 1 << 20
# With MXNet and one model 560 are taken: 290 of the engine's own, 270 of the other processes.
RESERVE_MIB = 640


def memory_limit_bytes() -> int:
    """What this process may use at most: the container's limit, or the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = container_memory()
    return total if container is None else min(total, container.limit_bytes)


def default_budget_bytes() -> int:
    """The limit less a reserve for the other processes, the libraries and working memory."""
    return budget_bytes(memory_limit_bytes())


def budget_bytes(limit_bytes: int) -> int:
    """Of a machine or container with so much memory."""
    return limit_bytes - max(RESERVE_MIB * MIB, limit_bytes // 4)


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


class Budget:
    """Counts weights and K/V bytes against a total. Safe to use from several threads.

    Beside all weights there is always room for one row of full context of any of the models: a
    request may have to wait for those before it, but none waits for ever.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.weight_bytes = 0
        self.kv_bytes = 0
        self._rows: list[int] = []  # bytes of such a row, of each model
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.weight_bytes - self.kv_bytes

    def reserve_weights(self, size: int, row: int, model: str) -> None:
        """`row`: bytes of keys and values of one row of full context.

        Raises what `check_weights` does.
        """
        with self._lock:
            self.check_weights(size, row, model)
            self.weight_bytes += size
            self._rows.append(row)

    def check_weights(self, size: int, row: int, model: str) -> None:
        """Raises `OutOfMemory`; `NeverFits` if not even an empty engine had room."""
        if size + row > self.total_bytes:
            raise NeverFits(
                f"model {model} needs {size / MIB:.0f} MiB and {row / MIB:.0f} for one request of"
                f" its whole context, the engine has {self.total_bytes / MIB:.0f} MiB in all"
                " (ENGINE_MEMORY_MIB sets it)"
            )
        kept = max(row, *self._rows, self.kv_bytes)
        missing = size - (self.total_bytes - self.weight_bytes - kept)
        if missing > 0:
            explained = self.explain(f"model {model}", size, kept)
            raise OutOfMemory(explained, missing_bytes=missing)

    def release_weights(self, size: int, row: int) -> None:
        with self._lock:
            self.weight_bytes -= size
            self._rows.remove(row)

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

    def explain(self, what: str, size: int, kept: int | None = None) -> str:
        """`kept`: bytes for requests, where they are more than those of the running ones."""
        requests = self.kv_bytes if kept is None else kept
        return (
            f"{what} needs {size / MIB:.0f} MiB, but of the engine's"
            f" {self.total_bytes / MIB:.0f} MiB {self.weight_bytes / MIB:.0f} are taken by models"
            f" and {requests / MIB:.0f} by requests"
        )
