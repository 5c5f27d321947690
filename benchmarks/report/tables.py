"""A run's page: tables in Markdown, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from command.tables import table as plain
from testbed import machine

Results = dict[str, Any]
Row = Sequence[str]
Table = tuple[Row, Iterable[Row]]  # its head and its rows
Values = Callable[[Results], Sequence[float]]
# Its name, the sense and the limit, the unit, and the value in every round.
Goal = tuple[str, str, float, str, Values]

QUANTILES = ("p50", "p90", "p99", "most")
FAULTS = ("wrong", "lost", "4xx", "5xx")


def page(results: Results, plan: str, tables: Iterable[Table]) -> str:
    """The machine, `plan`, the tables that have rows, and the goals."""
    lines = [*machine.lines(results["machine"]), f"Commit {results['commit']}; {plan}", ""]
    for head, rows in (*tables, goal_table(results["goals"])):
        lines += table(head, rows)
    lines += [f"not measured: {n} ({reason})" for n, reason in results["skipped"].items()]
    return "\n".join(lines)


def table(head: Row, rows: Iterable[Row]) -> Iterator[str]:
    """And an empty line; nothing where there are no rows."""
    if some := [*rows]:
        yield from (plain(head, some, markdown=True), "")


def judge(results: Results, goals: Iterable[Goal]) -> Iterator[Results]:
    """Each goal with its value in every round, their spread, and whether the median meets it.

    What was not measured has no `value`.
    """
    for name, sense, limit, unit, measure in goals:
        goal = {"name": name, "sense": sense, "limit": limit, "unit": unit}
        try:
            values = [*measure(results)]
            median = statistics.median(values)
        except (KeyError, ValueError):
            yield goal
            continue
        value = {"min": min(values), "median": median, "max": max(values)}
        met = median >= limit if sense == ">=" else median <= limit
        yield {**goal, "rounds": values, "value": value, "met": met}


def goal_table(goals: Iterable[Results]) -> Table:
    return ("", "goal", "measured", "met"), map(_goal, goals)


def _goal(goal: Results) -> Row:
    unit = "x" if goal["unit"] == "x" else f" {goal['unit']}"
    wanted = f"{goal['sense']} {goal['limit']:g}{unit}"
    if "value" not in goal:
        return goal["name"], wanted, "", "not measured"
    met = "yes" if goal["met"] else "**no**"
    return goal["name"], wanted, f"{shown(goal['rounds'], 2)}{unit}", met


# Values


def ratios(a: Iterable[float], b: Iterable[float]) -> list[float]:
    """Round by round."""
    return [x / y for x, y in zip(a, b, strict=False)]


def added(measured: Results, way: str, other: str) -> list[float]:
    """What `way` takes longer: the median of the differences of neighbours in time."""
    pairs = zip(measured[way], measured[other], strict=True)
    return [statistics.median(a - b for a, b in pairs)]


def scaled(values: Iterable[float], factor: float = 1000) -> list[float]:
    return [factor * value for value in values]


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each key over the rows."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """`QUANTILES`, and how many values there are."""
    if len(values) < 2:
        value = values[0] if values else float("nan")
        return {"count": len(values)} | dict.fromkeys(QUANTILES, value)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    of_all = (cuts[49], cuts[89], cuts[98], max(values))
    return {"count": len(values), **dict(zip(QUANTILES, of_all, strict=True))}


# Cells


def shown(values: Sequence[float], digits: int) -> str:
    """The median, and between which values it is."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def ms(measured: Results, *keys: str) -> list[str]:
    """Seconds of these keys, as milliseconds."""
    return [f"{1000 * measured[key]:,.0f}" for key in keys]


def mb(size: float, digits: int = 0) -> str:
    return f"{size / 1e6:,.{digits}f}"
