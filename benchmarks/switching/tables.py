"""The results of `switching` as Markdown, and its goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.report import machine, tables
from benchmarks.report.goals import Goal
from benchmarks.switching.clients import STATES

Results = dict[str, Any]
MODEL_PROCESSES = ("engine", "texts", "workers")
MISS_BYTES = 20_000_000


def lines(results: Results) -> Iterator[str]:
    plan, config = results["plan"], results["plan"]["config"]
    yield from machine.lines(results["machine"])
    against = f", against {results['against']}" if results["against"] else ""
    yield (
        f"Commit {results['commit']}{against}; {plan['models']} models of {config['num_layers']} x"
        f" {config['units']}, int8, {plan['budget_mib']:,} MiB for them; {plan['clients']} clients,"
        f" {plan['new_tokens']} tokens each, {plan['pause_s']} s pause"
        + (f"; a container of {plan['container_mib']:,} MiB" if plan["container_mib"] else "")
    )
    if found := results.get("trace"):
        yield from ("", *_latencies(found), "", *_rates(found), "", *_hits(found), "")
        yield from _memory_after(found)
    if others := [*_swaps(results), *_each(results), *_first(results)]:
        yield from ("", "| | |", "|---|---|", *others)
    if found := results.get("sweep"):
        yield from ("", *_sweep(found))
    if found := results.get("disk"):
        yield from ("", *_disk(found))
    yield ""
    yield from tables.goal_lines(results)
    for name, reason in results["skipped"].items():
        yield f"\nnot measured: {name} ({reason})"


def _latencies(found: Results) -> Iterator[str]:
    yield "| time to first token, ms | requests | p50 | p90 | p99 | most |"
    yield "|---|---|---|---|---|---|"
    for side, one in found.items():
        for state, q in one["first_token_s"].items():
            cells = (f"{1000 * q[key]:,.0f}" for key in ("p50", "p90", "p99", "most"))
            yield f"| {side}: {state} | {q['count']:,} | {' | '.join(cells)} |"


def _rates(found: Results) -> Iterator[str]:
    yield (
        "| | tokens/s | against one alone | wrong | lost | 4xx | 5xx"
        " | CPU of a request, ms | major faults | read, MB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for side, one in found.items():
        faults = " | ".join(str(one["faults"][kind]) for kind in ("wrong", "lost", "4xx", "5xx"))
        usage = [r["usage"] for r in one["rounds"]]
        cpu_s, faulted, read = (
            sum(u[key] for u in usage) for key in ("cpu_s", "major_faults", "read_bytes")
        )
        requests = one["first_token_s"]["all"]["count"]
        yield (
            f"| {side} | {one['tokens_per_s']:.1f} | {one['against_alone']:.2f}x | {faults}"
            f" | {1000 * cpu_s / max(requests, 1):,.0f} | {faulted:,} | {read / 1e6:,.0f} |"
        )


def _hits(found: Results) -> Iterator[str]:
    policies = list(next(iter(found.values()))["hits"])
    yield f"| requests that found their model hot | room | {' | '.join(policies)} |"
    yield "|---|---|" + "---|" * len(policies)
    for side, one in found.items():
        cells = (f"{one['hits'][name]:.1%}" for name in policies)
        yield f"| {side} | {one['room']} | {' | '.join(cells)} |"


def _memory_after(found: Results) -> Iterator[str]:
    yield "| after the trace, MB | processes | RSS | PSS | of it anonymous | by kind, anonymous |"
    yield "|---|---|---|---|---|---|"
    for side, one in found.items():
        memory = one["rounds"][-1]["memory"]
        sizes = (f"{memory[key] / 1e6:,.0f}" for key in ("rss", "pss", "anonymous"))
        kinds = sorted(memory["by_kind"].items(), key=lambda item: -item[1]["anonymous"])
        each = ", ".join(
            f"{kind} {m['anonymous'] / 1e6:,.0f}"
            + (f" ({m['processes']})" if m["processes"] > 1 else "")
            for kind, m in kinds
        )
        yield f"| {side} | {memory['processes']} | {' | '.join(sizes)} | {each} |"


def _swaps(results: Results) -> Iterator[str]:
    for side, found in results.get("swaps", {}).items():
        for state in STATES:
            values = [1000 * a["first_s"] for a in found["asked"] if a["state"] == state]
            if values:
                yield (
                    f"| {side}: first token of a {state} model, alone, ms"
                    f" | {tables.shown(values, 0)} |"
                )
        yield f"| {side}: CPU of such a call, ms | {1000 * found['cpu_s']:,.0f} |"
        values = [1000 * s for s in found["engine_ready_s"]]
        yield f"| {side}: the engine, closed to ready, ms | {tables.shown(values, 0)} |"


def _each(results: Results) -> Iterator[str]:
    for side, found in results.get("memory", {}).items():
        for one in found.values():
            states = one["steps"][-1]["states"]
            now = ", ".join(f"{count} {state}" for state, count in states.items())
            parts = ", ".join(
                f"{name} {one['each'][name]['anonymous'] / 1e6:.1f}" for name in one["each"]
            )
            yield f"| {side}: anonymous memory of a further model ({now}), MB | {parts} |"


def _first(results: Results) -> Iterator[str]:
    for side, values in results.get("first", {}).items():
        yield f"| {side}: the very first load to first token, s | {tables.shown(values, 2)} |"


def _sweep(found: Results) -> Iterator[str]:
    yield "| room for, of all models | budget, MiB | p50 | p90 | p99, ms | found hot | faults |"
    yield "|---|---|---|---|---|---|---|"
    for side, steps in found.items():
        for one in steps:
            q = one["first_token_s"]["all"]
            cells = " | ".join(f"{1000 * q[key]:,.0f}" for key in ("p50", "p90", "p99"))
            yield (
                f"| {side}: {one['share']:.0%} | {one['mib']:,} | {cells}"
                f" | {one['hits']['measured']:.0%} | {sum(one['faults'].values())} |"
            )


def _disk(found: Results) -> Iterator[str]:
    yield "| disk, MB/s | model | requests | first token, ms | read, MB | more than reading takes |"
    yield "|---|---|---|---|---|---|"
    for side, rows in found.items():
        for mb_s, state in sorted({(r["mb_s"] or 0, r["state"]) for r in rows}):
            some = [r for r in rows if (r["mb_s"] or 0, r["state"]) == (mb_s, state)]
            first = statistics.median(r["first_s"] for r in some)
            read = statistics.median(r["read_bytes"] for r in some) / 1e6
            more = f"{first / (read / mb_s):.2f}x" if mb_s and read else ""
            yield (
                f"| {side}: {mb_s or 'not limited'} | {state} | {len(some)}"
                f" | {1000 * first:,.0f} | {read:,.0f} | {more} |"
            )


def _misses(results: Results) -> list[float]:
    """Of models that were loaded once, less the 60 ms that anything may take."""
    return [
        (r["first_s"] - 0.06) / (r["read_bytes"] / 1e6 / r["mb_s"])
        for r in results["disk"]["now"]
        if r["mb_s"] and r["state"] != "cold" and r["read_bytes"] > MISS_BYTES
    ]


def _quantile(key: str, state: str = "all") -> Callable[[Results], list[float]]:
    return lambda r: [1000 * r["trace"]["now"]["first_token_s"][state][key]]


def _swap(results: Results) -> list[float]:
    asked = results["swaps"]["now"]["asked"]
    return [1000 * a["first_s"] for a in asked if a["state"] != "hot"]


def _further(results: Results) -> list[float]:
    each = results["memory"]["now"]["two fit"]["each"]
    return [sum(each[kind]["anonymous"] for kind in MODEL_PROCESSES if kind in each) / 1e6]


def _faults(results: Results) -> list[float]:
    return [float(sum(results["trace"]["now"]["faults"].values()))]


_ALWAYS: tuple[Goal, ...] = (
    ("wrong, lost, 4xx and 5xx", "<=", 0, "", _faults),
    (
        "tokens/s against one model alone",
        ">=",
        0.5,
        "x",
        lambda r: [r["trace"]["now"]["against_alone"]],
    ),
)
GOALS: tuple[Goal, ...] = (
    ("time to first token, p90", "<=", 200, "ms", _quantile("p90")),
    ("time to first token, p99", "<=", 350, "ms", _quantile("p99")),
    *_ALWAYS,
    ("a swap alone, to the first token", "<=", 120, "ms", _swap),
    (
        "the engine, closed to ready",
        "<=",
        50,
        "ms",
        lambda r: [1000 * s for s in r["swaps"]["now"]["engine_ready_s"]],
    ),
    ("private memory of a further model", "<=", 6, "MB", _further),
    ("a miss less 60 ms, against bytes / disk bandwidth", "<=", 1.3, "x", _misses),
    ("the very first load to first token", "<=", 0.8, "s", lambda r: list(r["first"]["now"])),
)
CONTAINER_GOALS: tuple[Goal, ...] = (
    ("time to first token, p99", "<=", 700, "ms", _quantile("p99")),
    *_ALWAYS,
)
