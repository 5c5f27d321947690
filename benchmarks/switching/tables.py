"""The results of switching as tables, and its goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.report import tables as report
from benchmarks.report.tables import FAULTS, QUANTILES, Goal, Results, Row, Table, mb, ms, shown
from benchmarks.switching.clients import by_state, first_s
from common.memory import MIB

MISS_BYTES = 20_000_000  # a call that reads less from the disk is no miss
ALL_HOT = "all hot"


def lines(results: Results) -> str:
    plan, config = results["plan"], results["plan"]["config"]
    what = (
        (f"against {results['against']}; " if results["against"] else "")
        + f"{plan['models']} {'deltas of one base' if plan['one_base'] else 'models'} of"
        f" {config['num_layers']} x {config['units']}, int8,"
        f" {plan['budget_mib']:,} MiB for them; {plan['clients']} clients,"
        f" {plan['new_tokens']} tokens each, {plan['pause_s']} s pause"
        + (f"; a container of {plan['container_mib']:,} MiB" if plan["container_mib"] else "")
    )
    trace = results.get("trace", {})
    latencies = ("first token without a prefix cache, ms", "requests", *QUANTILES)
    tables: list[Table] = [
        (latencies, _latencies(trace)),
        _rates(trace),
        _hits(trace),
        (("", ""), _others(results)),
        _sweep(results.get("sweep", {})),
        _disk(results.get("disk", {})),
    ]
    return report.page(results, what, tables)


def _latencies(measured: Results) -> Iterator[Row]:
    for side, one in measured.items():
        for state, q in one["first_token_s"].items():
            yield f"{side}: {state}", f"{q['count']:,}", *ms(q, *QUANTILES)


def _rates(measured: Results) -> Table:
    head = ("tokens/s", "against one alone", *FAULTS, "CPU of a request, ms", "major faults")
    rows = []
    for side, one in measured.items():
        cpu_s, faulted, read = (
            sum(r["usage"][key] for r in one["rounds"])
            for key in ("cpu_s", "major_faults", "read_bytes")
        )
        requests = max(one["first_token_s"]["all"]["count"], 1)
        rates = [f"{one['tokens_per_s']:.1f}", f"{one['against_alone']:.2f}x"]
        rates += [str(one["faults"][kind]) for kind in FAULTS]
        rows.append([side, *rates, f"{1000 * cpu_s / requests:,.0f}", f"{faulted:,}", mb(read)])
    return ("", *head, "read, MB"), rows


def _hits(measured: Results) -> Table:
    policies = [*next(iter(measured.values()))["hits"]] if measured else []
    rows = [
        (side, str(one["at_once"]), *(f"{one['hits'][name]:.1%}" for name in policies))
        for side, one in measured.items()
    ]
    return ("requests that found their model hot", "room", *policies), rows


def _others(results: Results) -> Iterator[Row]:
    for side, one in results.get("swaps", {}).items():
        for state, some in by_state(one["requests"]).items():
            label = f"{side}: first token of a {state} model, alone, ms"
            yield label, shown(report.in_ms(first_s(some)), 0) + _failed(some)
        yield f"{side}: CPU of such a call, ms", *ms(one, "cpu_s")
        opened = shown(report.in_ms(one["engine_ready_s"]), 0)
        yield f"{side}: the engine, closed to ready, ms", opened
    for side, measured in results.get("memory", {}).items():
        for one in measured.values():
            now = _states(one["steps"][-1]["states"])
            parts = [f"{name} {mb(m['anonymous'], 1)}" for name, m in one["each"].items()]
            yield f"{side}: anonymous memory of a further model ({now}), MB", ", ".join(parts)
    for side, values in results.get("first", {}).items():
        yield f"{side}: the very first load to first token, s", shown(values, 2)
    for side, one in results.get("registered", {}).items():
        yield f"{side}: start to ready, none loaded, s", f"{one['ready_s']:.1f}"
        for key, name in (("first_call", "first call to each"), ("any_call", "a call to any")):
            cells = ", ".join(ms(report.quantiles(first_s(one[key])), *QUANTILES))
            yield f"{side}: {name}, ms ({', '.join(QUANTILES)})", cells + _failed(one[key])
        sizes = " / ".join(mb(one["memory"][key]) for key in ("rss", "pss", "anonymous"))
        yield f"{side}: RSS / PSS / anonymous ({_states(one['states'])}), MB", sizes
        each = sum(kind["anonymous"] for kind in one["each"].values())
        yield f"{side}: anonymous memory of a further one, all processes, MB", mb(each, 1)
    if "models" in results:
        yield "the models, on the disk, MB", mb(results["models"])


def _failed(requests: Sequence[Results]) -> str:
    failed = len(requests) - len(first_s(requests))
    return f"; {failed} of {len(requests)} failed" if failed else ""


def _states(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _sweep(measured: Results) -> Table:
    rows = [
        (
            f"{side}: {one['share']:.0%}",
            *(f"{one[key]:,}" if one[key] else "" for key in ("container_mib", "mib")),
            *ms(one["first_token_s"]["all"], *QUANTILES[:3]),
            f"{one['hits']['measured']:.0%}",
            f"{one['tokens_per_s']:.1f}",
            mb(sum(r["usage"]["read_bytes"] for r in one["rounds"])),
            str(sum(one["faults"].values())),
        )
        for side, steps in measured.items()
        for one in steps
    ]
    head = ("container, MiB", "budget, MiB", *QUANTILES[:2], "p99, ms", "found hot")
    return ("room for, of all models", *head, "tokens/s", "read, MB", "faults"), rows


def _disk(measured: Results) -> Table:
    rows = []
    for side, answers in measured.items():
        if failed := _failed(answers):
            rows.append((f"{side}{failed}", *[""] * 5))
        done = [r for r in answers if not r["error"]]
        for mb_s, state in sorted({(r["mb_s"] or 0, r["state"]) for r in done}):
            some = [r for r in done if (r["mb_s"] or 0, r["state"]) == (mb_s, state)]
            first = statistics.median(first_s(some))
            read = statistics.median(r["read_bytes"] for r in some) / 1e6
            more = f"{first / (read / mb_s):.2f}x" if mb_s and read else ""
            limit = f"{side}: {mb_s or 'not limited'}"
            cells = (f"{1000 * first:,.0f}", f"{read:,.0f}", more)
            rows.append((limit, state, str(len(some)), *cells))
    head = ("model", "requests", "first token, ms", "read, MB", "more than reading takes")
    return ("disk, MB/s", *head), rows


# Goals


def _all_first_s(requests: Sequence[Results]) -> list[float]:
    """Return the seconds to the first tokens: infinite, which meets no goal, if any failed."""
    return [math.inf] if _failed(requests) else first_s(requests)


def _misses(results: Results) -> list[float]:
    """Return each miss's first token less 60 ms, over its bytes at the disk's bandwidth."""
    if _failed(results["disk"]["now"]):
        return [math.inf]
    return [
        (r["first_s"] - 0.06) / (r["read_bytes"] / 1e6 / r["mb_s"])
        for r in results["disk"]["now"]
        if r["mb_s"] and r["state"] != "cold" and r["read_bytes"] > MISS_BYTES
    ]


def _quantile(results: Results, key: str) -> list[float]:
    return [1000 * results["trace"]["now"]["first_token_s"]["all"][key]]


def _swap(results: Results) -> list[float]:
    answers = results["swaps"]["now"]["requests"]
    some = [a for a in answers if a["state"] != "hot" or a["error"]]
    return report.in_ms(_all_first_s(some))


def _further(results: Results) -> list[float]:
    each = results["memory"]["now"]["two fit"]["each"]
    return [sum(kind["anonymous"] for kind in each.values()) / 1e6]


_ALWAYS: tuple[Goal, ...] = (
    ("wrong, lost, 4xx and 5xx", "<=", 0, "",
     lambda r: [sum(r["trace"]["now"]["faults"].values())]),
    ("tokens/s against one model alone", ">=", 0.5, "x",
     lambda r: [r["trace"]["now"]["against_alone"]]),
)  # fmt: skip
GOALS: tuple[Goal, ...] = (
    ("time to first token, p90", "<=", 200, "ms", lambda r: _quantile(r, "p90")),
    ("time to first token, p99", "<=", 350, "ms", lambda r: _quantile(r, "p99")),
    *_ALWAYS,
    ("a swap alone, to the first token", "<=", 120, "ms", _swap),
    ("the engine, closed to ready", "<=", 50, "ms",
     lambda r: report.in_ms(r["swaps"]["now"]["engine_ready_s"])),
    ("private memory of a further model", "<=", 6, "MB", _further),
    ("a miss less 60 ms, against bytes / disk bandwidth", "<=", 1.3, "x", _misses),
    ("the very first load to first token", "<=", 0.8, "s", lambda r: r["first"]["now"]),
)  # fmt: skip
# Deltas of one base, a hundred in a container of 4 GiB.
DELTA_GOALS: tuple[Goal, ...] = (
    ("time to first token, p50", "<=", 25, "ms", lambda r: _quantile(r, "p50")),
    ("time to first token, p99", "<=", 120, "ms", lambda r: _quantile(r, "p99")),
    ("wrong, lost, 4xx and 5xx", "<=", 0, "",
     lambda r: [sum(r["trace"]["now"]["faults"].values())]),
    ("tokens/s against one model alone", ">=", 0.75, "x",
     lambda r: [r["trace"]["now"]["against_alone"]]),
    ("a first call to each", "<=", 50, "ms",
     lambda r: report.in_ms(_all_first_s(r["registered"]["now"]["first_call"]))),
)  # fmt: skip
CONTAINER_GOALS: tuple[Goal, ...] = (
    ("time to first token, p99", "<=", 700, "ms", lambda r: _quantile(r, "p99")),
    *_ALWAYS,
    ("start to ready, none loaded", "<=", 5, "s", lambda r: [r["registered"]["now"]["ready_s"]]),
    ("RSS of all processes", "<=", 6144, "MiB",
     lambda r: [r["registered"]["now"]["memory"]["rss"] / MIB]),
    ("a first call, the longest", "<=", 700, "ms",
     lambda r: [1000 * max(_all_first_s(r["registered"]["now"]["first_call"]))]),
)  # fmt: skip
