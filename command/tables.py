"""Numbers as people read them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Columns for a terminal, or in Markdown; the first and those without a head flush left."""
    made = Table(*head, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    if markdown:
        made = Table(*head, box=MARKDOWN)
    for column in made.columns[1:]:
        column.justify = "right" if column.header else "left"
    for row in rows:
        made.add_row(*map(Text, row))
    with (console := Console(file=io.StringIO(), width=1000)).capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def get(value: Any, *path: str) -> Any:
    """What is at a path of nested objects, None where something is missing."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
