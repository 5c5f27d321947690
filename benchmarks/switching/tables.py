"""The results of switching as tables, and its goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.report.goals import Goal, Results, Values
from benchmarks.report.tables import Row, page, shown, table
from benchmarks.switching.clients import STATES
from benchmarks.switching.summary import quantiles
from common.memory import MIB

MISS_BYTES = 20_000_000
ALL_HOT = "all hot"
QUANTILES = ("p50", "p90", "p99", "most")
FAULTS = ("wrong", "lost", "4xx", "5xx")


def lines(results: Results) -> str:
    plan, config = results["plan"], results["plan"]["config"]
    what = (
        (f"against {results['against']}; " if results["against"] else "")
        + f"{plan['models']} models of {config['num_layers']} x {config['units']}, int8,"
        f" {plan['budget_mib']:,} MiB for them; {plan['clients']} clients,"
        f" {plan['new_tokens']} tokens each, {plan['pause_s']} s pause"
        + (f"; a container of {plan['container_mib']:,} MiB" if plan["container_mib"] else "")
    )
    trace = results.get("trace", {})
    others = [*_swaps(results), *_each(results), *_first(results), *_registered(results)]
    if "models" in results:
        others.append(("the models, on the disk, MB", _mb(results["models"])))
    return page(
        results,
        what,
        table(("time to first token, ms", "requests", *QUANTILES), [*_latencies(trace)]),
        _rates(trace),
        _hits(trace),
        table(("", ""), others),
        _sweep(results.get("sweep", {})),
        _disk(results.get("disk", {})),
    )


def _ms(measured: Results, *keys: str) -> list[str]:
    return [f"{1000 * measured[key]:,.0f}" for key in keys]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f}"


def _latencies(measured: Results) -> Iterator[Row]:
    for side, one in measured.items():
        for state, q in one["first_token_s"].items():
            yield f"{side}: {state}", f"{q['count']:,}", *_ms(q, *QUANTILES)


def _rates(measured: Results) -> Iterator[str]:
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
        rows.append([side, *rates, f"{1000 * cpu_s / requests:,.0f}", f"{faulted:,}", _mb(read)])
    return table(("", *head, "read, MB"), rows)


def _hits(measured: Results) -> Iterator[str]:
    policies = [*next(iter(measured.values()))["hits"]] if measured else []
    rows = [
        (side, str(one["at_once"]), *(f"{one['hits'][name]:.1%}" for name in policies))
        for side, one in measured.items()
    ]
    return table(("requests that found their model hot", "room", *policies), rows)


def _swaps(results: Results) -> Iterator[Row]:
    for side, measured in results.get("swaps", {}).items():
        for state in STATES:
            if values := [1000 * a["first_s"] for a in measured["requests"] if a["state"] == state]:
                yield f"{side}: first token of a {state} model, alone, ms", shown(values, 0)
        yield f"{side}: CPU of such a call, ms", *_ms(measured, "cpu_s")
        opened = [1000 * s for s in measured["engine_ready_s"]]
        yield f"{side}: the engine, closed to ready, ms", shown(opened, 0)


def _each(results: Results) -> Iterator[Row]:
    for side, measured in results.get("memory", {}).items():
        for one in measured.values():
            states = one["steps"][-1]["states"]
            now = ", ".join(f"{count} {state}" for state, count in states.items())
            parts = [f"{name} {m['anonymous'] / 1e6:.1f}" for name, m in one["each"].items()]
            yield f"{side}: anonymous memory of a further model ({now}), MB", ", ".join(parts)


def _first(results: Results) -> Iterator[Row]:
    for side, values in results.get("first", {}).items():
        yield f"{side}: the very first load to first token, s", shown(values, 2)


def _registered(results: Results) -> Iterator[Row]:
    for side, one in results.get("registered", {}).items():
        yield f"{side}: start to ready, none loaded, s", f"{one['ready_s']:.1f}"
        for key, name in (("first_call", "first call to each"), ("any_call", "a call to any")):
            q = quantiles([row["first_s"] for row in one[key] if not row["error"]])
            lost = sum(bool(row["error"]) for row in one[key])
            cells = f"{', '.join(_ms(q, *QUANTILES))}; {lost} of {len(one[key])} failed"
            yield f"{side}: {name}, ms ({', '.join(QUANTILES)})", cells
        states = ", ".join(f"{count} {state}" for state, count in one["states"].items())
        sizes = " / ".join(_mb(one["memory"][key]) for key in ("rss", "pss", "anonymous"))
        yield f"{side}: RSS / PSS / anonymous ({states}), MB", sizes
        each = sum(kind["anonymous"] for kind in one["each"].values())
        yield f"{side}: anonymous memory of a further one, all processes, MB", f"{each / 1e6:.1f}"


def _sweep(measured: Results) -> Iterator[str]:
    rows = [
        (
            f"{side}: {one['share']:.0%}",
            *(f"{one[key]:,}" if one[key] else "" for key in ("container_mib", "mib")),
            *_ms(one["first_token_s"]["all"], *QUANTILES[:3]),
            f"{one['hits']['measured']:.0%}",
            f"{one['tokens_per_s']:.1f}",
            _mb(sum(r["usage"]["read_bytes"] for r in one["rounds"])),
            str(sum(one["faults"].values())),
        )
        for side, steps in measured.items()
        for one in steps
    ]
    head = ("container, MiB", "budget, MiB", *QUANTILES[:2], "p99, ms", "found hot")
    more = ("tokens/s", "read, MB", "faults")
    return table(("room for, of all models", *head, *more), rows)


def _disk(measured: Results) -> Iterator[str]:
    rows = []
    for side, answers in measured.items():
        for mb_s, state in sorted({(r["mb_s"] or 0, r["state"]) for r in answers}):
            some = [r for r in answers if (r["mb_s"] or 0, r["state"]) == (mb_s, state)]
            first = statistics.median(r["first_s"] for r in some)
            read = statistics.median(r["read_bytes"] for r in some) / 1e6
            more = f"{first / (read / mb_s):.2f}x" if mb_s and read else ""
            limit = f"{side}: {mb_s or 'not limited'}"
            cells = (f"{1000 * first:,.0f}", f"{read:,.0f}", more)
            rows.append((limit, state, str(len(some)), *cells))
    head = ("model", "requests", "first token, ms", "read, MB", "more than reading takes")
    return table(("disk, MB/s", *head), rows)


# Goals


def _misses(results: Results) -> list[float]:
    """Of models that were loaded once, less the 60 ms that anything may take."""
    return [
        (r["first_s"] - 0.06) / (r["read_bytes"] / 1e6 / r["mb_s"])
        for r in results["disk"]["now"]
        if r["mb_s"] and r["state"] != "cold" and r["read_bytes"] > MISS_BYTES
    ]


def _quantile(key: str) -> Values:
    return lambda r: [1000 * r["trace"]["now"]["first_token_s"]["all"][key]]


def _swap(results: Results) -> list[float]:
    answers = results["swaps"]["now"]["requests"]
    return [1000 * a["first_s"] for a in answers if a["state"] != "hot"]


def _opened(results: Results) -> list[float]:
    return [1000 * seconds for seconds in results["swaps"]["now"]["engine_ready_s"]]


def _further(results: Results) -> list[float]:
    each = results["memory"]["now"]["two fit"]["each"]
    return [sum(kind["anonymous"] for kind in each.values()) / 1e6]


def _faults(results: Results) -> list[float]:
    return [float(sum(results["trace"]["now"]["faults"].values()))]


def _against_alone(results: Results) -> list[float]:
    return [results["trace"]["now"]["against_alone"]]


def _rss(results: Results) -> list[float]:
    return [results["registered"]["now"]["memory"]["rss"] / MIB]


def _first_calls(results: Results) -> list[float]:
    return [1000 * row["first_s"] for row in results["registered"]["now"]["first_call"]]


_ALWAYS: tuple[Goal, ...] = (
    ("wrong, lost, 4xx and 5xx", "<=", 0, "", _faults),
    ("tokens/s against one model alone", ">=", 0.5, "x", _against_alone),
)
GOALS: tuple[Goal, ...] = (
    ("time to first token, p90", "<=", 200, "ms", _quantile("p90")),
    ("time to first token, p99", "<=", 350, "ms", _quantile("p99")),
    *_ALWAYS,
    ("a swap alone, to the first token", "<=", 120, "ms", _swap),
    ("the engine, closed to ready", "<=", 50, "ms", _opened),
    ("private memory of a further model", "<=", 6, "MB", _further),
    ("a miss less 60 ms, against bytes / disk bandwidth", "<=", 1.3, "x", _misses),
    ("the very first load to first token", "<=", 0.8, "s", lambda r: list(r["first"]["now"])),
)
CONTAINER_GOALS: tuple[Goal, ...] = (
    ("time to first token, p99", "<=", 700, "ms", _quantile("p99")),
    *_ALWAYS,
    ("start to ready, none loaded", "<=", 5, "s", lambda r: [r["registered"]["now"]["ready_s"]]),
    ("RSS of all processes", "<=", 6144, "MiB", _rss),
    ("a first call, the longest", "<=", 700, "ms", lambda r: [max(_first_calls(r))]),
)
