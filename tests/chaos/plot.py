"""Plots the results of `python -m tests.chaos --recovery` or `--soak`:
python -m tests.chaos.plot RESULTS.json PLOT.png, with matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, GOAL = "#1f6fb2", "#c44e52"


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    results = json.loads(source.read_text(encoding="utf-8"))
    figure = soak(results) if "samples" in results else recovery(results)
    machine = results["machine"]
    figure.suptitle(
        f"{machine['cores']} cores of {machine['cpu']}, {results['commit']}", fontsize=10
    )
    figure.savefig(target, dpi=150)


def recovery(results: dict[str, Any]) -> Any:
    """A dot for each kill; a line for each goal."""
    kinds = list(results["seconds"])
    figure, axis = pyplot.subplots(figsize=(8, 0.8 + 0.4 * len(kinds)), layout="constrained")
    for place, kind in enumerate(kinds):
        values = results["seconds"][kind]
        axis.plot(values, [place] * len(values), "o", color=OURS, alpha=0.5, markersize=4)
        goal = results["goals"].get(kind)
        if goal:
            axis.plot([goal, goal], [place - 0.3, place + 0.3], color=GOAL)
    axis.plot([], [], color=GOAL, label="goal for the 95th percentile")
    axis.legend(frameon=False, fontsize=8)
    axis.set_yticks(range(len(kinds)), kinds)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel(f"seconds until all {results['models']} models answer again")
    _bare(axis)
    return figure


def soak(results: dict[str, Any]) -> Any:
    """Each as a share of its median after the warm-up."""
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    samples = results["samples"]
    minutes = [sample["at_s"] / 60 for sample in samples]
    for key, judged in results["judged"].items():
        if isinstance(judged, dict) and "drift" in judged:
            first = judged["first"] or 1
            axis.plot(minutes, [100 * sample[key] / first for sample in samples], label=key)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("minutes")
    axis.set_ylabel("% of the median after the warm-up")
    axis.legend(frameon=False, fontsize=8, ncols=2)
    _bare(axis)
    return figure


def _bare(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
