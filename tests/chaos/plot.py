"""Plots the results of `python -m tests.chaos --recovery` or `--soak`:
python -m tests.chaos.plot RESULTS.json PLOT.png, with matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from benchmarks.report.plot import GOAL, OURS, save


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    (soak if "samples" in results else recovery)(axis, results)
    axis.legend(frameon=False, fontsize=8, ncols=2)
    save(figure, results["machine"], results["commit"], sys.argv[2])


def recovery(axis: Any, results: dict[str, Any]) -> None:
    """A dot for each kill; a line for each goal."""
    for place, (kind, values) in enumerate(results["seconds"].items()):
        axis.plot(values, [place] * len(values), "o", color=OURS, alpha=0.5, markersize=4)
        if goal := results["goals"].get(kind):
            axis.plot([goal, goal], [place - 0.3, place + 0.3], color=GOAL)
    axis.plot([], [], color=GOAL, label="goal for the 95th percentile")
    axis.set_yticks(range(len(results["seconds"])), list(results["seconds"]))
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel(f"seconds until all {results['models']} models answer again")


def soak(axis: Any, results: dict[str, Any]) -> None:
    """Each value as a share of its median after the warm-up."""
    samples = results["samples"]
    minutes = [sample["at_s"] / 60 for sample in samples]
    for key, judged in results["judged"].items():
        if isinstance(judged, dict) and "drift" in judged:
            first = judged["first"] or 1
            axis.plot(minutes, [100 * sample[key] / first for sample in samples], label=key)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("minutes")
    axis.set_ylabel("% of the median after the warm-up")


if __name__ == "__main__":
    main()
