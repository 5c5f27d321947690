"""The memory budget: admits weights, keys and values before they are allocated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from common.errors import NeverFits, OutOfMemory
from common.memory import MIB

# Memory outside of the budget, for libraries and other processes. Measured with MXNet and one
# model: 290 MiB in the engine, 270 in the others. Smaller: the container runs out of memory.
RESERVE_MIB = 640


def budget_bytes(limit_bytes: int) -> int:
    """Return the budget for a machine or container with `limit_bytes` of memory."""
    return limit_bytes - max(RESERVE_MIB * MIB, limit_bytes // 4)


class Budget:
    """Admits weights and K/V bytes up to a total number of bytes. Thread-safe.

    The weights of all loaded models may take `overcommit` times the total; weights in memory
    (`engine.residency`) and K/V bytes together may take the total. Beside the weights, one row of
    full context of any resident model always fits, so every queued request can run in the end.
    """

    def __init__(self, total_bytes: int, overcommit: int = 1) -> None:
        self.total_bytes, self.overcommit = total_bytes, overcommit
        self.declared_bytes = 0  # weights of all models
        self.weight_bytes = 0  # weights in memory
        self.kv_bytes = 0
        # Called with the bytes that a K/V reservation lacks, to evict weights.
        self.on_kv_shortage: Callable[[int], None] = lambda missing: None
        # Called after a reservation has grown, to shrink the prefix cache.
        self.on_growth: Callable[[], object] = lambda: None
        self._rows: list[tuple[str, int]] = []  # model, K/V bytes of a row of full context
        self._claimant: object = None  # the next to get K/V bytes, see `reserve_kv`
        self._lock = threading.RLock()  # reentrant: `declare` calls `check` while it holds the lock

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.weight_bytes - self.kv_bytes

    def declare(self, size: int, row: int, model: str) -> None:
        """Count a new model, with `size` bytes of weights, if it fits. Raises as `check`."""
        with self._lock:
            self.check(size, row, model)
            self.declared_bytes += size
            self._rows.append((model, row))

    def check(
        self, size: int, row: int, model: str, promised: Mapping[str, int] | None = None
    ) -> None:
        """Check that `size` bytes of weights and a row of `row` K/V bytes fit beside all models.

        `promised` has the bytes of models that will be loaded, by name. Raises `OutOfMemory`, or
        `NeverFits` if the model would not even fit into an empty engine.
        """
        if size + row > self.total_bytes:
            raise NeverFits(
                f"the model needs {size / MIB:.0f} MiB and {row / MIB:.0f} for one request of"
                f" its whole context, the engine has {self.total_bytes / MIB:.0f} MiB in all"
                " (ENGINE_MEMORY_MIB sets it)"
            )
        with self._lock:
            declared = {name for name, _ in self._rows}
            to_come = sum(b for name, b in (promised or {}).items() if name not in declared)
            reserve = max(row, *(bytes for _, bytes in self._rows), self.kv_bytes)
            taken = self.declared_bytes + to_come + reserve
        missing = size + taken - self.overcommit * self.total_bytes
        if missing > 0:
            times = f"{self.overcommit} times " if self.overcommit > 1 else ""
            raise OutOfMemory(
                f"the model needs {size / MIB:.0f} MiB, but of the engine's"
                f" {times}{self.total_bytes / MIB:.0f} MiB"
                f" {self.declared_bytes / MIB:.0f} are taken by models and"
                f" {reserve / MIB:.0f} by requests",
                missing_bytes=missing,
                needed_bytes=size,
            )

    def withdraw(self, size: int, row: int, model: str) -> None:
        with self._lock:
            self.declared_bytes -= size
            self._rows.remove((model, row))

    def missing_bytes(self, size: int, row: int) -> int:
        """Return how many bytes must be freed for `size` bytes of weights and a row of `row`."""
        reserve = max(row, self.kv_bytes)
        return max(0, size + reserve + self.weight_bytes - self.total_bytes)

    def take(self, size: int) -> None:
        """Count `size` more bytes of weights in memory, or fewer if negative, without a check."""
        with self._lock:
            self.weight_bytes += size
        if size > 0:
            self.on_growth()

    def reserve_kv(self, size: int, claimant: object) -> bool:
        """Reserve `size` bytes for keys and values; return False if they are not free.

        The first `claimant` that is refused has priority: all others are refused until it succeeds
        or calls `withdraw_claim`.
        """
        missing = size - self.free_bytes
        if missing > 0:
            self.on_kv_shortage(missing)
        with self._lock:
            if self._claimant not in (None, claimant):
                return False
            if size > self.free_bytes:
                self._claimant = claimant
                return False
            self._claimant = None
            self.kv_bytes += size
        self.on_growth()
        return True

    def withdraw_claim(self, claimant: object) -> None:
        with self._lock:
            if self._claimant is claimant:
                self._claimant = None

    def release_kv(self, size: int) -> None:
        with self._lock:
            self.kv_bytes -= size

    def kv_problem(self, size: int, weights: int) -> str | None:
        """Return an error message if `size` K/V bytes never fit beside `weights` bytes, or None."""
        if size <= self.total_bytes - weights:
            return None
        return (
            f"the request's K/V cache needs {size / MIB:.0f} MiB, but the engine has"
            f" {self.total_bytes / MIB:.0f} MiB, of which its model takes {weights / MIB:.0f}"
        )
