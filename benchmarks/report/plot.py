"""Draws the results: python -m benchmarks.report.plot RESULTS.json PLOT.png, with matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.report import goals

OURS, THEIRS = "#1f6fb2", "#9aa5b1"


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    results = json.loads(source.read_text(encoding="utf-8"))
    names = [n for n in results["contenders"] if goals.tokens_per_s(results, n, 1)]
    labels = [results["contenders"][name]["label"] for name in names]
    colors = [OURS if label.startswith("ours") else THEIRS for label in labels]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.45 * len(names)), sharey=True, layout="constrained"
    )
    per_token = [[1000 / rate for rate in goals.tokens_per_s(results, n, 1)] for n in names]
    bars(left, labels, per_token, colors, 1)
    left.set_xscale("log")
    left.set_xlabel("ms per token, one request (log scale; less is better)")
    if results.get("bandwidth", {}).get("rounds"):
        for place, name in enumerate(names):
            floor = goals.floor_ms(results, name)
            left.plot([floor, floor], [place - 0.4, place + 0.4], color="black", linewidth=1.5)
        left.plot([], [], color="black", linewidth=1.5, label="weight bytes / read bandwidth")
        figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    together = [
        goals.tokens_per_s(results, n, 8 if "8" in results["contenders"][n]["rows"] else 1)
        for n in names
    ]
    bars(right, labels, together, colors, 0)
    right.set_xlabel("tokens/s, eight requests (the guides' loop: one at a time)")
    left.invert_yaxis()
    plan, machine = results["plan"], results["machine"]
    figure.suptitle(
        f"{machine['cores']} cores of {machine['cpu']};"
        f" {plan['config']['num_layers']} x {plan['config']['units']},"
        f" {plan['prompt_tokens']}-token prompt, {plan['new_tokens']} new tokens,"
        f" medians of {plan['rounds']} rounds",
        fontsize=10,
    )
    figure.savefig(target, dpi=150)


def bars(axis: Any, labels: list[str], values: list[list[float]], colors: Any, digits: int) -> None:
    """A bar for each median with its value, and a line from the least to the most."""
    medians = [statistics.median(v) for v in values]
    places = range(len(labels))
    around = [
        [m - min(v) for m, v in zip(medians, values, strict=True)],
        [max(v) - m for m, v in zip(medians, values, strict=True)],
    ]
    drawn = axis.barh(places, medians, color=colors, xerr=around, ecolor="#555555", capsize=2)
    axis.bar_label(drawn, [f"{m:.{digits}f}" for m in medians], padding=4, fontsize=9)
    axis.set_yticks(places, labels)
    axis.margins(x=0.15)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
