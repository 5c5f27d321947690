"""Draws a run: python -m benchmarks.report.plot RESULTS.json PLOT.png, with matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.engine.speeds import floor_ms, tokens_per_s

OURS, THEIRS = "#1f6fb2", "#9aa5b1"
GOAL = "#c44e52"
COLORS = (OURS, THEIRS, GOAL)
QUANTILES = {"p50": ":", "p90": "--", "p99": "-"}
POLICIES = {"measured": "-", "LRU": ":", "Belady": "--"}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    results = json.loads(source.read_text(encoding="utf-8"))
    plan = results["plan"]
    draw, what = (_sweep, _sweep_of(plan)) if "sweep" in results else (_speeds, _speeds_of(plan))
    save(draw(results), results["machine"], what, target)


def save(figure: Any, machine: dict[str, Any], what: str, target: Path | str) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{machine['cores']} cores of {machine['cpu']}; {what}", fontsize=10)
    figure.savefig(target, dpi=150)


def _speeds_of(plan: dict[str, Any]) -> str:
    return (
        f"{plan['config']['num_layers']} x {plan['config']['units']},"
        f" {plan['prompt_tokens']}-token prompt, {plan['new_tokens']} new tokens,"
        f" medians of {plan['rounds']} rounds"
    )


def _speeds(results: dict[str, Any]) -> Any:
    """Draw a bar per contender: milliseconds per token, and tokens per second of eight rows."""
    names = [n for n in results["contenders"] if tokens_per_s(results, n, 1)]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.45 * len(names)), sharey=True, layout="constrained"
    )
    measured = [results["contenders"][name] for name in names]
    labels = [one["label"] for one in measured]
    _bars(left, labels, [[1000 / r for r in tokens_per_s(results, n, 1)] for n in names], 1)
    left.set_xscale("log")
    left.set_xlabel("ms per token, one request (log scale; less is better)")
    if results.get("bandwidth", {}).get("rounds"):
        for place, name in enumerate(names):
            floor = statistics.median(floor_ms(results, name))
            left.plot([floor, floor], [place - 0.4, place + 0.4], color="black", linewidth=1.5)
        left.plot([], [], color="black", linewidth=1.5, label="weight bytes / read bandwidth")
        figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    rows = [8 if "8" in one["rows"] else 1 for one in measured]
    _bars(right, labels, [tokens_per_s(results, *n) for n in zip(names, rows, strict=True)], 0)
    right.set_xlabel("tokens/s, eight requests (the guides' loop: one at a time)")
    left.invert_yaxis()
    return figure


def _bars(axis: Any, labels: list[str], values: list[list[float]], digits: int) -> None:
    """Draw a bar for each median with its value, and a line from the least to the most."""
    colors = [OURS if label.startswith("ours") else THEIRS for label in labels]
    medians = [statistics.median(v) for v in values]
    around = [
        [m - min(v) for m, v in zip(medians, values, strict=True)],
        [max(v) - m for m, v in zip(medians, values, strict=True)],
    ]
    places = range(len(labels))
    drawn = axis.barh(places, medians, color=colors, xerr=around, ecolor="#555555", capsize=2)
    axis.bar_label(drawn, [f"{m:.{digits}f}" for m in medians], padding=4, fontsize=9)
    axis.set_yticks(places, labels)
    axis.margins(x=0.15)


def _sweep_of(plan: dict[str, Any]) -> str:
    return f"{plan['models']} models, {plan['clients']} clients, {plan['new_tokens']} tokens each"


def _sweep(results: dict[str, Any]) -> Any:
    """Draw the time to first token, and hits or tokens a second, over the size of memory."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    containers = results["plan"]["container_mib"]
    for color, (side, steps) in zip(COLORS, results["sweep"].items(), strict=False):
        sizes = [s["container_mib"] if containers else 100 * s["share"] for s in steps]

        def line(axis: Any, style: str, key: str, values: list[float]) -> None:
            axis.plot(sizes, values, style, color=color, marker=".", label=f"{side}, {key}")  # noqa: B023

        for key, style in QUANTILES.items():
            line(left, style, key, [1000 * s["first_token_s"]["all"][key] for s in steps])
        if containers:
            line(right, "-", "tokens/s", [s["tokens_per_s"] for s in steps])
            continue
        for key, style in POLICIES.items():
            line(right, style, key, [100 * s["hits"][key] for s in steps])
    left.set_yscale("log")
    left.set_ylabel("time to first token, ms (log scale)")
    right.set_ylabel("tokens/s" if containers else "requests that found their model hot, %")
    for axis in (left, right):
        axis.set_xlabel(
            "the container's memory, MiB" if containers else "models that fit into the memory, %"
        )
        axis.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
