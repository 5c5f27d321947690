"""Formats numbers and tables."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text


def ms(seconds: float | None) -> str:
    """Format a time as milliseconds, with a decimal below 100."""
    if seconds is None:
        return ""
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plain(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Format a table for a terminal or in Markdown.

    The first column and those without a title are aligned left, the others right.
    """
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
