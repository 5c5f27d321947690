"""The report of a run, as text and as files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from command.tables import table
from tests.chaos.history import PUT, History
from tests.chaos.plan import Plan
from tests.chaos.run import Result

SHOWN = 20


def write(folder: Path, plan: Plan, result: Result) -> None:
    """plan.json, history.json, server.log."""
    plan.write(folder / "plan.json")
    history = json.dumps(asdict(result.history), ensure_ascii=False)
    (folder / "history.json").write_text(history, encoding="utf-8")
    (folder / "server.log").write_text(result.log, encoding="utf-8")


def lines(result: Result) -> list[str]:
    history = result.history
    found = [_requests(history), ""]
    done = Counter(fault.kind for fault in history.faults if not fault.skipped)
    found.append("faults: " + ", ".join(f"{n} {kind}" for kind, n in sorted(done.items())))
    skipped = Counter(fault.skipped for fault in history.faults if fault.skipped)
    found += [f"  {n} not done: {why}" for why, n in skipped.items()]
    for violation in result.violations[:SHOWN]:
        found.append(f"{violation.rule}: {violation.message}")
        if op := violation.op:
            at = f"{op.begin - history.began:.2f} to {op.end - history.began:.2f} s"
            found.append(f"    {op.kind} {op.model} {op.id}, {at}: {op.status} {op.text!r}")
    return [*found, f"{len(result.violations)} violations"]


def _requests(history: History) -> str:
    kinds = list(dict.fromkeys(op.kind for op in history.ops if op.kind != PUT))
    statuses = sorted({op.status for op in history.ops if not op.hung_up})
    rows = []
    for kind in kinds:
        ops = [op for op in history.ops if op.kind == kind]
        counts = Counter(op.status for op in ops if not op.hung_up)
        gone = sum(op.hung_up for op in ops)
        rows.append([kind, *(str(counts[status] or "") for status in statuses), str(gone or "")])
    shown = [str(status) if status else "lost" for status in statuses]
    return table(["", *shown, "hung up"], rows)
