"""Numbers as people read them."""

from __future__ import annotations

import unicodedata
from typing import Any


def ms(seconds: float | None) -> str:
    """Milliseconds with two or three digits that count."""
    if seconds is None:
        return ""
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plain(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns for a terminal; the first one flush left. Korean letters take two places."""
    lines = [head, *rows]
    widths = [max(width(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell + " " * (w - width(cell)) if i == 0 else " " * (w - width(cell)) + cell
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def width(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def get(value: Any, *path: str) -> Any:
    """What is at a path of nested objects, None where something is missing."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
