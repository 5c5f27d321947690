"""The numbers to reach, each from the rounds of one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Results = dict[str, Any]
Values = Callable[[Results], list[float]]
# Its name, the sense and the limit, the unit, and the value in every round.
Goal = tuple[str, str, float, str, Values]


def goals(results: Results, wanted: Sequence[Goal]) -> Iterator[dict[str, Any]]:
    """Each goal with its value in every round, their spread, and whether the median meets it.

    What was not measured has no `value`.
    """
    for name, sense, limit, unit, measure in wanted:
        goal = {"name": name, "sense": sense, "limit": limit, "unit": unit}
        try:
            values = measure(results)
            median = statistics.median(values)
        except (KeyError, ValueError):
            yield goal
            continue
        value = {"min": min(values), "median": median, "max": max(values)}
        met = median >= limit if sense == ">=" else median <= limit
        yield {**goal, "rounds": values, "value": value, "met": met}
