"""Compares the reports of two load tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command.documents import read_text
from command.errors import Problem
from command.tables import ms, plain, table
from scripts.traffic.samples import lookup

# (label, path in the results, whether it is a time, or None for a count)
ROWS = (
    ("requests/s", ("all", "requests_per_s"), False),
    ("tokens/s", ("all", "tokens_per_s"), False),
    *((f"latency {p} ms", ("all", "seconds", p), True) for p in ("p50", "p90", "p95", "p99")),
    *((f"first token {p} ms", ("all", "first_token_s", p), True) for p in ("p50", "p99")),
    ("outside the model p50 ms", ("all", "outside_model_s", "p50"), True),
    ("requests", ("all", "requests"), None),
    ("errors", ("all", "errors"), None),
    ("cold starts", ("loads", "count"), None),
)


def read(path: Path) -> dict[str, Any]:
    """Read the JSON report of a load test. Raises `Problem`."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("format") != 1 or "plan" not in value:
        raise Problem(f"{path} is not a report of kogpt2 load-test --json")
    return value


def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Format both reports' numbers and the ratio of the second to the first."""
    names = dict.fromkeys([*before["models"], *after["models"]])
    models = [
        (f"{name or '-'}: latency p50 ms", ("models", name, "seconds", "p50"), True)
        for name in names
    ]
    rows = []
    for label, path, in_ms in [*ROWS, *models]:
        a, b = lookup(before, *path), lookup(after, *path)
        if a is not None or b is not None:
            rows.append([label, _shown(a, in_ms), _shown(b, in_ms), ratio(a, b)])
    output = [table(["", "first", "second", "ratio"], rows)]
    a, b = before["plan"], after["plan"]
    differences = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    if differences:
        output += ["", "The plans differ:"]
        output += [f"  {n}: {_plain(a.get(n))} and {_plain(b.get(n))}" for n in differences]
    return output


def ratio(a: float | None, b: float | None) -> str:
    return f"{b / a:.2f}x" if a and b is not None else ""


def _shown(value: float | None, in_ms: bool | None) -> str:
    if in_ms:
        return ms(value)
    return plain(value, 0 if in_ms is None else 1)


def _plain(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
