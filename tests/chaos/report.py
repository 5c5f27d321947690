"""The report of a run, as text and as files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from command.tables import table
from tests.chaos.history import PUT, History
from tests.chaos.plan import Plan
from tests.chaos.run import Result

SHOWN = 20


def write(folder: Path, plan: Plan, result: Result) -> None:
    """plan.json, history.json, server.log."""
    plan.write(folder / "plan.json")
    result.history.write(folder / "history.json")
    (folder / "server.log").write_text(result.log, encoding="utf-8")


def lines(result: Result) -> list[str]:
    history = result.history
    found = [_requests(history), ""]
    done = Counter(fault.kind for fault in history.faults if not fault.skipped)
    found.append("faults: " + ", ".join(f"{n} {kind}" for kind, n in sorted(done.items())))
    skipped = Counter(fault.skipped for fault in history.faults if fault.skipped)
    found += [f"  {n} not done: {why}" for why, n in skipped.items()]
    worked, count = retries(history)
    if count:
        found.append(f"503 with Retry-After: {count}, and {worked} of them worked after that time")
    if result.explained:
        found += ["", _reasons(result.explained)]
    found.append("")
    for violation in result.violations[:SHOWN]:
        found.append(f"{violation.rule}: {violation.message}")
        if op := violation.op:
            at = f"{op.begin - history.began:.2f} to {op.end - history.began:.2f} s"
            found.append(f"    {op.kind} {op.model} {op.id}, {at}: {op.status} {op.text!r}")
    found += [empty(history), f"{len(result.violations)} violations"]
    return found


def empty(history: History) -> str:
    """Counts and bytes of the server at its start, and after all was unloaded."""
    start, end = history.empty
    rows = [
        [name, f"{start.get(name, 0):,}", f"{end.get(name, 0):,}"]
        for name in dict.fromkeys((*start, *end))
    ]
    return table(["", "at the start", "after all was unloaded"], rows)


def _reasons(found: Counter[tuple[int, str]]) -> str:
    """A table of faults by the 5xx answers that they explain."""
    statuses = sorted({status for status, _ in found})
    kinds = sorted({kind for _, kind in found})
    rows = [[kind, *(str(found[status, kind] or "") for status in statuses)] for kind in kinds]
    return table(["errors explained by", *map(str, statuses)], rows)


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


def retries(history: History) -> tuple[int, int]:
    """Of the retried 503s with Retry-After, how many worked at once, and how many there are."""
    by_id = {op.id: op for op in history.ops}
    worked = count = 0
    for op in history.ops:
        begin, _, attempt = op.id.rpartition("-")
        if op.status == 503 and op.retry_after_s and attempt.isdigit():
            again = by_id.get(f"{begin}-{int(attempt) + 1}")
            if again is not None:
                count += 1
                worked += 0 < again.status < 500
    return worked, count
