"""Formats the results of `kogpt2 gpu-check` as Markdown, and lists the failures."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np

from benchmarks.report.tables import mb, sizes, table

Checked = dict[str, Any]

# Limits of the logits' error over their standard deviation. fp16 rounds by 2^-12 on average, some
# fifty times in a pass; fp32 on a GPU may be TF32 in MXNet's products, with fp16's mantissa.
MOST_ERROR = {"fp32": 2e-3, "fp16": 5e-3}
# Limits of the largest difference of a logit between a row in a batch and the row alone.
MOST_ROW_DIFFERENCE = {"fp32": 1e-2, "fp16": 5e-2}


def lines(results: Checked) -> Iterator[str]:
    plan, measured = results["plan"], results["backends"]
    yield f"{_device(results['device'])}; {_packages()}"
    yield f"Random models of {sizes(plan)}\n"
    columns = [_column(each, plan) for each in measured.values()]
    head = ("", *(f"{name} {each['precision']}" for name, each in measured.items()))
    rows = [(title, *(column[title] for column in columns)) for title in columns[0]]
    yield from table(head, rows)
    for name, reason in results["skipped"].items():
        yield f"not measured: {name} ({reason})"


def _column(f: Checked, plan: Checked) -> dict[str, str]:
    rows, models = plan["rows"], plan["models"]
    first, *more = f["loads"]
    further = statistics.median(load["seconds"] for load in more)
    demo = [a for name, a in f["accuracy"].items() if name != "random"]
    same, texts = (sum(a[key] for a in demo) for key in ("same_texts", "texts"))
    alone = f"a row among {rows} against alone, largest difference of a logit"
    return {
        "logits against fp32 on the CPU, relative error": f"{_error(f):.1e}",
        "greedy texts of the demo models that are the same": f"{same} of {texts}",
        alone: f"{f['rows']['max_difference']:.1e}",
        "B=1, tokens/s (a decode step, ms)": _speed(f["B=1"], 1),
        f"B={rows}, tokens/s (a decode step, ms)": _speed(f[f"B={rows}"], rows),
        f"{models} models in turn, tokens/s": f"{f['turns_tokens_per_s']:,.0f}",
        "load, s: the first model, a further one": f"{first['seconds']:.2f}, {further:.2f}",
        "a model's weights, MB": _mb(first["weight_bytes"]),
        "memory of a further model, MB": _further(f),
        "memory in use with none, before and after, MB": (
            f"{_mb(f['empty_bytes'])}, {_mb(f['unloaded_bytes'])}"
        ),
        "memory that runs out": _exhausted(f),
    }


def failures(results: Checked) -> Iterator[str]:
    for name, f in results["backends"].items():
        precision = f["precision"]
        if not _error(f) <= MOST_ERROR[precision]:  # NaN is a failure, too
            yield f"{name}: logits are off by {_error(f):.1e}, must be {MOST_ERROR[precision]:.0e}"
        for model, a in f["accuracy"].items():
            if model != "random" and a["same_texts"] != a["texts"]:
                yield f"{name}: {a['same_texts']} of {a['texts']} texts of {model} are the same"
        rows = f["rows"]
        if not rows["max_difference"] <= MOST_ROW_DIFFERENCE[precision] * rows["logits_std"]:
            yield f"{name}: a row depends on its batch by {rows['max_difference']:.1e}"
        for what, good in f.get("exhausted", {}).items():
            if not good:
                yield f"{name}: when memory ran out, it was not {what}"


def _error(f: Checked) -> float:
    return float(np.max([a["relative_logit_error"] for a in f["accuracy"].values()]))


def _speed(rounds: list[list[float]], rows: int) -> str:
    tokens_per_s = statistics.median(rows * len(steps) / sum(steps) for steps in rounds)
    step_ms = statistics.median(1e3 * statistics.median(steps[1:]) for steps in rounds)
    return f"{tokens_per_s:,.0f} ({step_ms:.2f})"


def _further(f: Checked) -> str:
    used = [load["memory_bytes"] for load in f["loads"]]
    return "?" if None in used else _mb((used[-1] - used[0]) / (len(used) - 1))


def _exhausted(f: Checked) -> str:
    if "exhausted" not in f:
        return "not tried"
    refused = "refused" if f["exhausted"]["refused"] else "**not refused**"
    same = "then the same text" if f["exhausted"]["same"] else "**then another text**"
    return f"{refused}, {same}"


def _mb(size: float | None) -> str:
    return "?" if size is None else mb(size)


def _device(device: str) -> str:
    if device == "cpu":
        return f"**The CPU in place of a GPU**, {len(os.sched_getaffinity(0))} cores"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "a GPU (nvidia-smi does not say which)"
    return answer.stdout.splitlines()[0]


def _packages() -> str:
    """Return the installed MXNet and onnxruntime, whose names differ in builds for a GPU."""
    measured = {d.name: d.version for d in metadata.distributions()}
    ours = [name for name in sorted(measured) if name.startswith(("mxnet", "onnxruntime"))]
    return ", ".join(f"{name} {measured[name]}" for name in ours)
