"""The results of adapters as tables, and their goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.report import tables as report
from benchmarks.report.tables import FAULTS, QUANTILES, Goal, Results, Row, in_ms, mb, ms, shown


def _against(results: Results, kind: str, adapters: int) -> list[float]:
    """Return the ratio of a kind's steps to those of eight different adapters, by round."""
    steps = {(s["kind"], s["rank"], s["adapters"]): s["seconds"] for s in results["steps"]}
    return report.ratios(steps[kind, 0, adapters], steps["adapters", results["plan"]["rank"], 8])


def _memory_mb(results: Results) -> list[float]:
    """Return the anonymous memory of an adapter; its own bytes are in the page cache."""
    return [sum(kind["anonymous"] for kind in results["memory"]["each"].values()) / 1e6]


GOALS: tuple[Goal, ...] = (
    ("8 rows of 8 adapters against 8 rows of one model", ">=", 0.85, "x",
     lambda r: _against(r, "one model", 0)),
    ("8 rows of 8 adapters against 8 whole models in turns", ">=", 4, "x",
     lambda r: _against(r, "whole models", 8)),
    ("a call for an adapter that is not loaded: first token", "<=", 60, "ms",
     lambda r: in_ms(r["first"]["again"])),
    ("a further adapter beyond its bytes", "<=", 1.5, "MB", _memory_mb),
    ("all adapters, Zipf: errors and wrong answers", "<=", 0, "",
     lambda r: [sum(r["trace"]["faults"][name] for name in FAULTS)]),
    ("the same: p99 of the first token", "<=", 250, "ms",
     lambda r: [1000 * r["trace"]["first_token_s"]["p99"]]),
    ("the same: tokens/s against one alone", ">=", 0.7, "x",
     lambda r: [r["trace"]["tokens_per_s"] / r["trace"]["alone_tokens_per_s"]]),
)  # fmt: skip


def lines(results: Results) -> str:
    plan, config = results["plan"], results["plan"]["config"]
    what = (
        f"{plan['models']:,} adapters of rank {plan['rank']} on c_attn and c_proj of one base of"
        f" {config['num_layers']} x {config['units']} in int8, {plan['budget_mib']:,} MiB for them"
        + (f" in a container of {plan['container_mib']:,} MiB" if plan["container_mib"] else "")
        + f"; {plan['clients']} clients, {plan['new_tokens']} tokens each"
    )
    traces = ("", "requests", "tokens/s", "first token, ms: p50", "p90", "p99", "most", "faults")
    beside = ("8 adapters, no prefix cache", "tokens/s: Zipf", "uniform", "first token, ms: p50")
    tables = [
        (("8 rows", "rank", "different", "ms a step", "against none"), _steps(results)),
        (traces, _traces(results)),
        ((*beside, "p99", "memory, MB", "tokens as transformers'"), _peers(results)),
        (("", ""), _others(results)),
    ]
    return report.page(results, what, tables)


def _steps(results: Results) -> Iterator[Row]:
    steps = results.get("steps", [])
    none = statistics.median(steps[0]["seconds"]) if steps else 1
    for one in steps:
        median = statistics.median(one["seconds"])
        rank, different = (str(one[key] or "") for key in ("rank", "adapters"))
        yield one["kind"], rank, different, f"{1000 * median:.2f}", f"{none / median:.2f}x"


def _traces(results: Results) -> Iterator[Row]:
    for name, kind in (("trace", "Zipf (1.0)"), ("uniform", "uniform")):
        if name in results:
            one: Mapping[str, Any] = results[name]
            faults = ", ".join(f"{key} {one['faults'][key]}" for key in FAULTS)
            for label, requests, which, end in (
                (kind, f"{one['requests']:,}", "", faults),
                (f"{kind}: then one alone", "", "alone_", ""),
            ):
                firsts = ms(one[f"{which}first_token_s"], *QUANTILES)
                yield label, requests, f"{one[f'{which}tokens_per_s']:.0f}", *firsts, end


def _peers(results: Results) -> Iterator[Row]:
    for one in results.get("peers", []):
        rates = [f"{one[kind]['tokens_per_s']:.0f}" for kind in ("Zipf", "uniform")]
        same = "" if one.get("same") is None else f"{one['same']:.0%}"
        firsts = ms(one["Zipf"]["first_token_s"], "p50", "p99")
        yield one["name"], *rates, *firsts, mb(one["memory"]), same


def _others(results: Results) -> Iterator[Row]:
    for which, what in (("ever", "was never loaded"), ("again", "is not loaded any more")):
        if "first" in results:
            cell = shown(in_ms(results["first"][which]), 0)
            yield f"a call for an adapter that {what}: first token, ms", cell
    if "memory" in results:
        for kind, measured in results["memory"]["each"].items():
            label = f"a further adapter, {kind}: anonymous memory, MB"
            yield label, mb(measured["anonymous"], 2)
        yield "its matrices in fp16, MB", mb(results["memory"]["bytes"], 2)
    for name in ("trace", "uniform"):
        if name in results:
            yield f"adapters loaded at the end ({name})", f"{results[name]['loaded']:,}"
            label = f"anonymous memory of all processes then ({name}), MB"
            yield label, mb(results[name]["memory"]["anonymous"])
