"""A histogram of durations, as Prometheus counts them."""

from __future__ import annotations

import bisect
from typing import Any

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """A histogram of durations in seconds. One thread may write it while others read it."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    def describe(self) -> dict[str, Any]:
        """Return `{"buckets": [[bound, count up to it], ...], "sum"}`; the last bound is "+Inf"."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), list(self._counts), strict=True):
            total += count
            buckets.append([str(bound), total])
        return {"buckets": buckets, "sum": self.sum}
