"""The results of adapters as tables, and their goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.report.goals import Goal, Results
from benchmarks.report.tables import Row, page, table
from benchmarks.switching.tables import QUANTILES

FAULTS = ("wrong", "lost", "4xx", "5xx")


def seconds_of(results: Results, kind: str, rank: int, adapters: int) -> list[float]:
    """Of the steps of one kind. Raises `KeyError` where there are none."""
    for one in results["steps"]:
        if (one["kind"], one["rank"], one["adapters"]) == (kind, rank, adapters):
            measured: list[float] = one["seconds"]
            return measured
    raise KeyError(kind)


def _against(results: Results, kind: str, adapters: int) -> list[float]:
    """Steps of another kind over those of as many different adapters, round by round."""
    rank = results["plan"]["rank"]
    others = seconds_of(results, kind, 0, adapters)
    own = seconds_of(results, "adapters", rank, 8)
    return [other / one for other, one in zip(others, own, strict=True)]


def _share(results: Results) -> list[float]:
    one = results["trace"]
    return [one["tokens_per_s"] / one["alone_tokens_per_s"]]


def _faults(results: Results) -> list[float]:
    return [sum(results["trace"]["faults"][name] for name in FAULTS)]


def _memory_mb(results: Results) -> list[float]:
    """What an adapter takes beyond its own bytes, which are page cache."""
    return [sum(kind["anonymous"] for kind in results["memory"]["each"].values()) / 1e6]


GOALS: tuple[Goal, ...] = (
    ("8 rows of 8 adapters against 8 rows of one model", ">=", 0.85, "x",
     lambda r: _against(r, "one model", 0)),
    ("8 rows of 8 adapters against 8 whole models in turns", ">=", 4, "x",
     lambda r: _against(r, "whole models", 8)),
    ("a call for an adapter that is not loaded: first token", "<=", 60, "ms",
     lambda r: [1000 * s for s in r["first"]["again"]]),
    ("a further adapter beyond its bytes", "<=", 1.5, "MB", _memory_mb),
    ("all adapters, Zipf: errors and wrong answers", "<=", 0, "", _faults),
    ("the same: p99 of the first token", "<=", 250, "ms",
     lambda r: [1000 * r["trace"]["first_token_s"]["p99"]]),
    ("the same: tokens/s against one alone", ">=", 0.7, "x", _share),
)  # fmt: skip


def lines(results: Results) -> str:
    plan, config = results["plan"], results["plan"]["config"]
    what = (
        f"{plan['models']:,} adapters of rank {plan['rank']} on c_attn and c_proj of one base of"
        f" {config['num_layers']} x {config['units']} in int8, {plan['budget_mib']:,} MiB for them"
        + (f" in a container of {plan['container_mib']:,} MiB" if plan["container_mib"] else "")
        + f"; {plan['clients']} clients, {plan['new_tokens']} tokens each"
    )
    return page(
        results,
        what,
        table(("8 rows", "rank", "different", "ms a step", "against none"), [*_steps(results)]),
        table(("", "requests", "tokens/s", "first token, ms: p50", "p90", "p99", "most", "faults"),
              [*_traces(results)]),
        table(("8 adapters, 8 clients", "tokens/s: Zipf", "uniform", "first token, ms: p50", "p99",
               "memory, MB", "tokens as transformers'"), [*_peers(results)]),
        table(("", ""), [*_others(results)]),
    )  # fmt: skip


def _steps(results: Results) -> Iterator[Row]:
    steps = results.get("steps", [])
    none = statistics.median(steps[0]["seconds"]) if steps else 1
    for one in steps:
        median = statistics.median(one["seconds"])
        rank, different = (str(one[key] or "") for key in ("rank", "adapters"))
        yield one["kind"], rank, different, f"{1000 * median:.2f}", f"{none / median:.2f}x"


def _traces(results: Results) -> Iterator[Row]:
    for name in ("trace", "uniform"):
        if name not in results:
            continue
        one: Mapping[str, Any] = results[name]
        kind = "Zipf (1.0)" if name == "trace" else "uniform"
        faults = ", ".join(f"{key} {one['faults'][key]}" for key in FAULTS)
        yield (kind, f"{one['requests']:,}", f"{one['tokens_per_s']:.0f}",
               *_ms(one["first_token_s"]), faults)  # fmt: skip
        yield (f"{kind}: then one alone", "", f"{one['alone_tokens_per_s']:.0f}",
               *_ms(one["alone_first_token_s"]), "")  # fmt: skip


def _peers(results: Results) -> Iterator[Row]:
    for one in results.get("peers", []):
        same = one.get("same")
        yield (one["name"], *(f"{one[kind]['tokens_per_s']:.0f}" for kind in ("Zipf", "uniform")),
               *_ms(one["Zipf"]["first_token_s"])[:3:2], f"{one['memory'] / 1e6:,.0f}",
               "" if same is None else f"{same:.0%}")  # fmt: skip


def _ms(measured: Results) -> list[str]:
    return [f"{1000 * measured[key]:,.0f}" for key in QUANTILES]


def _others(results: Results) -> Iterator[Row]:
    for which, measured in results.get("first", {}).items():
        firsts = [1000 * s for s in measured]
        value = f"{statistics.median(firsts):.0f} ({min(firsts):.0f}-{max(firsts):.0f})"
        what = {"ever": "was never loaded", "again": "is not loaded any more"}[which]
        yield f"a call for an adapter that {what}: first token, ms", value
    if "memory" in results:
        for kind, measured in results["memory"]["each"].items():
            yield (
                f"a further adapter, {kind}: anonymous memory, MB",
                f"{measured['anonymous'] / 1e6:.2f}",
            )
        yield "its matrices in fp16, MB", f"{results['memory']['bytes'] / 1e6:.2f}"
    for name in ("trace", "uniform"):
        if name in results:
            yield f"adapters loaded at the end ({name})", f"{results[name]['loaded']:,}"
            whole = sum(k["anonymous"] for k in results[name]["memory"]["by_kind"].values())
            yield f"anonymous memory of all processes then ({name}), MB", f"{whole / 1e6:,.0f}"
