"""Tables in Markdown, and what every run's page has."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.report import machine
from command.tables import table as plain

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    """And an empty line; nothing where there are no rows."""
    if rows:
        yield from (plain(head, rows, markdown=True), "")


def page(results: dict[str, Any], plan: str, *parts: Iterator[str]) -> str:
    """The machine, `plan`, the parts of it that were measured, and the goals."""
    lines = [*machine.lines(results["machine"]), f"Commit {results['commit']}; {plan}", ""]
    lines += [line for part in parts for line in part]
    lines += goal_table(results["goals"])
    lines += [f"not measured: {n} ({reason})" for n, reason in results["skipped"].items()]
    return "\n".join(lines)


def goal_table(goals: Sequence[dict[str, Any]]) -> Iterator[str]:
    return table(("", "goal", "measured", "met"), [_goal(goal) for goal in goals])


def _goal(goal: dict[str, Any]) -> Row:
    unit = "x" if goal["unit"] == "x" else f" {goal['unit']}"
    wanted = f"{goal['sense']} {goal['limit']:g}{unit}"
    if "value" not in goal:
        return goal["name"], wanted, "", "not measured"
    met = "yes" if goal["met"] else "**no**"
    return goal["name"], wanted, f"{shown(goal['rounds'], 2)}{unit}", met


def shown(values: Sequence[float], digits: int) -> str:
    """The median, and between which values it is."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each key over the rows."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}
