"""Speeds from the results of a run, for tables and plots.

Standard library only: plots are drawn in the environment of the peers.
"""

from __future__ import annotations

from typing import Any

Results = dict[str, Any]


def rounds(results: Results, name: str, rows: int, key: str) -> list[Any]:
    measured = results["contenders"][name]["rows"][str(rows)]["rounds"]
    return [entry[key] for entry in measured]


def tokens_per_s(results: Results, name: str, rows: int) -> list[float]:
    """Return the tokens per second of all rows together, in each round."""
    tokens = rows * results["plan"]["new_tokens"]
    return [tokens / seconds for seconds in rounds(results, name, rows, "seconds")]


def step_ms(results: Results, name: str) -> list[float]:
    """Return the median milliseconds of a decode step of one row, in each round."""
    return [1000 * seconds for seconds in rounds(results, name, 1, "step_s")]


def floor_ms(results: Results, name: str) -> list[float]:
    """Return the milliseconds that reading the weights once takes, in each round.

    The bandwidth is the higher of those measured just before and just after: a disturbed
    measurement must not flatter, and the machine's bandwidth changes within a run.
    """
    values = results["contenders"][name]
    size: int = values.get("step_bytes", values["weight_bytes"])
    return [1000 * size / max(rates) for rates in rounds(results, name, 1, "read_bytes_per_s")]
