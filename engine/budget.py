"""The memory budget: admits weights, keys and values before they are allocated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from common.errors import NeverFits, OutOfMemory
from common.memory import MIB

# Memory that the budget leaves to the libraries and the other processes. Measured with MXNet and
# one model: 290 MiB in the engine, 270 in the others. Less: the container runs out of memory.
RESERVE_MIB = 640


def budget_bytes(limit_bytes: int) -> int:
    """The budget on a machine or in a container with `limit_bytes` of memory, less the reserve."""
    return limit_bytes - max(RESERVE_MIB * MIB, limit_bytes // 4)


class Budget:
    """Counts weights and K/V bytes against a total. Thread-safe.

    All loaded models together may have `overcommit` times the total of weights; those in memory
    (`engine.residency`) count against the total itself. Beside them there is always space for one
    row of full context of any resident model, so every queued request gets its turn.
    """

    def __init__(self, total_bytes: int, overcommit: int = 1) -> None:
        self.total_bytes, self.overcommit = total_bytes, overcommit
        self.declared_bytes = 0  # weights of all models
        self.weight_bytes = 0  # those in memory
        self.kv_bytes = 0
        # Called with the bytes that a K/V reservation lacks, to evict weights.
        self.on_kv_shortage: Callable[[int], None] = lambda missing: None
        # Called after a reservation has grown, to shrink the prefix cache.
        self.on_growth: Callable[[], object] = lambda: None
        self._rows: list[tuple[str, int]] = []  # by model, bytes of a row of full context
        self._claimant: object = None  # the next to get K/V bytes, see `reserve_kv`
        self._lock = threading.RLock()  # `declare` checks and counts under one lock

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.weight_bytes - self.kv_bytes

    def declare(self, size: int, row: int, model: str) -> None:
        """Count a new model's weights, and `row` bytes for one row of full context; see `check`."""
        with self._lock:
            self.check(size, row, model)
            self.declared_bytes += size
            self._rows.append((model, row))

    def check(
        self, size: int, row: int, model: str, promised: Mapping[str, int] | None = None
    ) -> None:
        """Check that a model fits beside all declared ones and those to come.

        `promised` has bytes by the names of models that will be loaded. Raises `OutOfMemory`, and
        `NeverFits` where the model does not fit into an empty engine either.
        """
        if size + row > self.total_bytes:
            raise NeverFits(
                f"model {model} needs {size / MIB:.0f} MiB and {row / MIB:.0f} for one request of"
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
                f"model {model} needs {size / MIB:.0f} MiB, but of the engine's"
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
        """Bytes that are missing for `size` more of weights beside a row of `row` bytes."""
        reserve = max(row, self.kv_bytes)
        return max(0, size + reserve + self.weight_bytes - self.total_bytes)

    def take(self, size: int) -> None:
        """Count weights as in memory; a negative size gives them back. See `missing_bytes`."""
        with self._lock:
            self.weight_bytes += size
        if size > 0:
            self.on_growth()

    def reserve_kv(self, size: int, claimant: object) -> bool:
        """Reserve bytes for keys and values; returns whether they could be reserved.

        The first `claimant` that is refused is next: no other gets bytes until it has its own or
        withdraws its claim.
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
        """Why `size` bytes of K/V never fit beside `weights` bytes; None if they may."""
        if size <= self.total_bytes - weights:
            return None
        return (
            f"the request's K/V cache needs {size / MIB:.0f} MiB, but the engine has"
            f" {self.total_bytes / MIB:.0f} MiB, of which its model takes {weights / MIB:.0f}"
        )
