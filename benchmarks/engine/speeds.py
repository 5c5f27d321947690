"""Speeds from the results of a run, for tables and plots.

Standard library only: plots are drawn in the environment of the peers.
"""

from __future__ import annotations

import statistics
from typing import Any

Results = dict[str, Any]


def rounds(results: Results, name: str, rows: int, key: str) -> list[float]:
    measured = results["contenders"][name]["rows"][str(rows)]["rounds"]
    return [entry[key] for entry in measured]


def tokens_per_s(results: Results, name: str, rows: int) -> list[float]:
    """Of all rows together, in each round."""
    tokens = rows * results["plan"]["new_tokens"]
    return [tokens / seconds for seconds in rounds(results, name, rows, "seconds")]


def step_ms(results: Results, name: str) -> list[float]:
    """Of a decode step of one row, in each round."""
    return [1000 * seconds for seconds in rounds(results, name, 1, "step_s")]


def bandwidth(results: Results) -> list[float]:
    """Bytes per second, before and after each round: of the fastest way to read."""
    return [max(kernels.values()) for kernels in results["bandwidth"]["rounds"]]


def floor_ms(results: Results, name: str) -> float:
    """What reading the weights once takes, with the median of the run's bandwidths.

    Not the highest: the machines are shared, and a moment without neighbours is not what the steps
    had. Not round by round: a disturbed measurement would flatter that round.
    """
    size: int = results["contenders"][name]["weight_bytes"]
    return 1000 * size / statistics.median(bandwidth(results))
