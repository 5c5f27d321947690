"""A run's page: tables in Markdown, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from command.tables import table as plain
from testbed import machine

Results = dict[str, Any]
Row = Sequence[str]
Table = tuple[Row, Iterable[Row]]  # the head and the rows
Values = Callable[[Results], Sequence[float]]
# (name, sense as ">=", limit, unit, a function that returns the value in every round)
Goal = tuple[str, str, float, str, Values]

QUANTILES = ("p50", "p90", "p99", "most")
FAULTS = ("wrong", "lost", "4xx", "5xx")


def page(results: Results, plan: str, tables: Iterable[Table]) -> str:
    """Return a page with the machine, `plan`, the tables that have rows, and the goals."""
    lines = [*machine.lines(results["machine"]), f"Commit {results['commit']}; {plan}", ""]
    for head, rows in (*tables, goal_table(results["goals"])):
        lines += table(head, rows)
    lines += [f"not measured: {n} ({reason})" for n, reason in results["skipped"].items()]
    return "\n".join(lines)


def sizes(plan: Results) -> str:
    """Describe the random models and the texts of a plan."""
    config = plan["config"]
    return (
        f"{config['num_layers']} layers x {config['units']} units, vocabulary"
        f" {config['vocab_size']:,}; {plan['prompt_tokens']}-token prompts, {plan['new_tokens']}"
        f" new tokens; medians of {plan['rounds']} rounds"
    )


def table(head: Row, rows: Iterable[Row]) -> Iterator[str]:
    """Yield a table in Markdown and an empty line, or nothing if there are no rows."""
    if some := [*rows]:
        yield from (plain(head, some, markdown=True), "")


def judge(results: Results, goals: Iterable[Goal]) -> Iterator[Results]:
    """Yield each goal with its values by round, their spread, and whether the median meets it.

    Goals that were not measured have no `value`.
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
    """Divide `a` by `b`, round by round."""
    return [x / y for x, y in zip(a, b, strict=False)]


def added(measured: Results, way: str, other: str) -> list[float]:
    """Return how much longer `way` takes than `other`: the median of paired differences."""
    pairs = zip(measured[way], measured[other], strict=True)
    return [statistics.median(a - b for a, b in pairs)]


def in_ms(seconds: Iterable[float]) -> list[float]:
    return [1000 * value for value in seconds]


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each key over the rows."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the `QUANTILES` of values, and their number as `count`."""
    if len(values) < 2:
        value = values[0] if values else float("nan")
        return {"count": len(values)} | dict.fromkeys(QUANTILES, value)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    of_all = (cuts[49], cuts[89], cuts[98], max(values))
    return {"count": len(values), **dict(zip(QUANTILES, of_all, strict=True))}


# Cells


def shown(values: Sequence[float], digits: int) -> str:
    """Format the median of values, with the least and the most in brackets."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def ms(measured: Results, *keys: str) -> list[str]:
    """Format the seconds under these keys as milliseconds."""
    return [f"{1000 * measured[key]:,.0f}" for key in keys]


def mb(size: float, digits: int = 0) -> str:
    return f"{size / 1e6:,.{digits}f}"
