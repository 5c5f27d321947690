"""Draws a sweep: python -m benchmarks.report.switching_plot RESULTS.json PLOT.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

STYLES = {"p50": ":", "p90": "--", "p99": "-"}
COLORS = ("#1f6fb2", "#9aa5b1", "#c44e52")


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    results = json.loads(source.read_text(encoding="utf-8"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for color, (side, steps) in zip(COLORS, results["sweep"].items(), strict=False):
        shares = [100 * step["share"] for step in steps]
        for key, style in STYLES.items():
            values = [1000 * step["first_token_s"]["all"][key] for step in steps]
            left.plot(shares, values, style, color=color, marker=".", label=f"{side}, {key}")
        for policy, style in (("measured", "-"), ("LRU", ":"), ("Belady", "--")):
            values = [100 * step["hits"][policy] for step in steps]
            right.plot(shares, values, style, color=color, marker=".", label=f"{side}, {policy}")
    left.set_yscale("log")
    left.set_ylabel("time to first token, ms (log scale)")
    right.set_ylabel("requests that found their model hot, %")
    plan, machine = results["plan"], results["machine"]
    for axis in (left, right):
        axis.set_xlabel("models that fit into the memory, %")
        axis.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(
        f"{plan['models']} models, {plan['clients']} clients, {plan['new_tokens']} tokens each;"
        f" {machine['cores']} cores of {machine['cpu']}",
        fontsize=10,
    )
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main()
