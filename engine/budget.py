"""The memory budget: what may be loaded and what may run, decided before anything is allocated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from common.errors import NeverFits, OutOfMemory
from common.memory import MIB, memory_limit_bytes

# With MXNet and one model 560 are taken: 290 of the engine's own, 270 of the other processes.
RESERVE_MIB = 640


def default_budget_bytes() -> int:
    """The limit less a reserve for the other processes, the libraries and working memory."""
    return budget_bytes(memory_limit_bytes())


def budget_bytes(limit_bytes: int) -> int:
    """Of a machine or container with so much memory."""
    return limit_bytes - max(RESERVE_MIB * MIB, limit_bytes // 4)


class Budget:
    """Counts weights and K/V bytes against a total. Safe to use from several threads.

    Models are declared with all their weights, and may together come to `overcommit` times the
    total; of their weights only those in memory count against it (`engine.residency`). Beside these
    there is always room for one row of full context of any of the models that have them: a request
    may have to wait for those before it, but none waits for ever.
    """

    def __init__(self, total_bytes: int, overcommit: int = 1) -> None:
        self.total_bytes, self.overcommit = total_bytes, overcommit
        self.declared_bytes = 0  # weights of all models
        self.weight_bytes = 0  # those in memory
        self.kv_bytes = 0
        # Called with a number of bytes that are wanted for K/V and are not there: gives up weights.
        self.spare: Callable[[int], None] = lambda missing: None
        # Called once more was given out: what is kept for want of anything better goes.
        self.given: Callable[[], object] = lambda: None
        self._rows: list[tuple[str, int]] = []  # by model, bytes of a row of full context
        self._claimant: object = None  # see `reserve_kv`
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.weight_bytes - self.kv_bytes

    def declare(self, size: int, row: int, model: str) -> None:
        """`row`: bytes of keys and values of one row of full context.

        Raises what `check` does.
        """
        with self._lock:
            self._check(size, row, model, 0)
            self.declared_bytes += size
            self._rows.append((model, row))

    def check(
        self, size: int, row: int, model: str, promised: Mapping[str, int] | None = None
    ) -> None:
        """Whether they fit beside what is `promised` to other models, in bytes, where those are not
        declared yet.

        Raises `OutOfMemory`; `NeverFits` if not even an empty engine had room.
        """
        with self._lock:
            declared = {name for name, _ in self._rows}
            to_come = sum(b for name, b in (promised or {}).items() if name not in declared)
            self._check(size, row, model, to_come)

    def _check(self, size: int, row: int, model: str, promised: int) -> None:
        if size + row > self.total_bytes:
            raise NeverFits(
                f"model {model} needs {size / MIB:.0f} MiB and {row / MIB:.0f} for one request of"
                f" its whole context, the engine has {self.total_bytes / MIB:.0f} MiB in all"
                " (ENGINE_MEMORY_MIB sets it)"
            )
        kept = max(row, *(bytes for _, bytes in self._rows), self.kv_bytes)
        taken = self.declared_bytes + promised + kept
        missing = size + taken - self.overcommit * self.total_bytes
        if missing > 0:
            times = f"{self.overcommit} times " if self.overcommit > 1 else ""
            raise OutOfMemory(
                f"model {model} needs {size / MIB:.0f} MiB, but of the engine's"
                f" {times}{self.total_bytes / MIB:.0f} MiB"
                f" {self.declared_bytes / MIB:.0f} are taken by models and"
                f" {kept / MIB:.0f} by requests",
                missing_bytes=missing,
                needed_bytes=size,
            )

    def withdraw(self, size: int, row: int, model: str) -> None:
        with self._lock:
            self.declared_bytes -= size
            self._rows.remove((model, row))

    def lacks(self, size: int, row: int) -> int:
        """How many bytes are missing for `size` more of weights in memory, beside a row of `row`
        bytes; 0 if none is."""
        kept = max(row, self.kv_bytes)
        return max(0, size + kept + self.weight_bytes - self.total_bytes)

    def take(self, size: int) -> None:
        """Counts weights as in memory; whoever calls has asked `lacks`. Negative: gives back."""
        with self._lock:
            self.weight_bytes += size
        if size > 0:
            self.given()

    def reserve_kv(self, size: int, claimant: object) -> bool:
        """Reserves bytes for keys and values.

        The first `claimant` that is refused comes next: until it has its bytes, or withdraws its
        claim, others get none.
        """
        missing = size - self.free_bytes
        if missing > 0:
            self.spare(missing)
        with self._lock:
            if self._claimant not in (None, claimant):
                return False
            if size > self.free_bytes:
                self._claimant = claimant
                return False
            self._claimant = None
            self.kv_bytes += size
        self.given()
        return True

    def withdraw_claim(self, claimant: object) -> None:
        with self._lock:
            if self._claimant is claimant:
                self._claimant = None

    def release_kv(self, size: int) -> None:
        with self._lock:
            self.kv_bytes -= size

    def could_hold_kv(self, size: int, weights: int) -> bool:
        """Whether `size` would fit beside so many bytes of weights if nothing else were running."""
        return size <= self.total_bytes - weights

    def explain_kv(self, size: int, weights: int) -> str:
        return (
            f"the request's K/V cache needs {size / MIB:.0f} MiB, but the engine has"
            f" {self.total_bytes / MIB:.0f} MiB, of which its model takes {weights / MIB:.0f}"
        )
