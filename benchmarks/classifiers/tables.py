"""The results of classifiers as tables, and their goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.gateway import batch
from benchmarks.report import tables as report
from benchmarks.report.tables import Goal, Results, Row, shown

LABELS = {
    "transformers": "transformers fp32",
    "openvino": "OpenVINO int8",
    "onnxruntime": "onnxruntime int8",
    "fp32": "ours, fp32",
    "int8": "ours, int8",
    "adapter": "ours, int8: an adapter",
    "adapters": "ours, int8: eight adapters, eight texts each",
    "http": "ours, int8: over HTTP",
}
REFERENCE = "transformers"
COMPARED = ("openvino", "onnxruntime", "fp32", "int8")  # with the reference
PEERS = ("transformers", "openvino", "onnxruntime")
GAPS = {
    "alone": "alone",
    "adapter": "beside a list, of an adapter of their model",
    "whole": "beside a list, of another model",
}


def rates(results: Results, name: str) -> list[float]:
    """Return texts a second, by round."""
    texts = results["plan"]["texts"]
    return [texts / one["seconds"] for one in results["speeds"][name]]


def _over(results: Results, name: str, *others: str) -> list[float]:
    """Return the ratio of texts a second to the best of others that were measured, by round."""
    measured = [rates(results, other) for other in others if other in results["speeds"]]
    return report.ratios(rates(results, name), [max(each) for each in zip(*measured, strict=True)])


def probabilities(results: Results, name: str) -> NDArray[np.float64]:
    """Return the probabilities (rounds x texts, labels)."""
    logits = np.concatenate([one["logits"] for one in results["speeds"][name]])
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    made: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return made


def _error(results: Results, name: str) -> float:
    difference = probabilities(results, name) - probabilities(results, REFERENCE)
    return float(np.abs(difference).max())


def _p99(results: Results, name: str) -> list[float]:
    return [report.quantiles(one["gaps_s"])["p99"] for one in results["gaps"][name]]


def _gaps_over_alone(results: Results) -> list[float]:
    return report.ratios(_p99(results, "adapter"), _p99(results, "alone"))


GOALS: tuple[Goal, ...] = (
    ("64 texts, int8, against the best peer", ">=", 1.2, "x", lambda r: _over(r, "int8", *PEERS)),
    ("the same over HTTP, against in process", ">=", 0.9, "x", lambda r: _over(r, "http", "int8")),
    ("eight adapters, against 64 texts of one", ">=", 0.85, "x",
     lambda r: _over(r, "adapters", "adapter")),
    ("fp32, largest difference of a probability to transformers", "<=", 10, "millionths",
     lambda r: [1e6 * _error(r, "fp32")]),
    ("growth of RSS in a batch of lines, MMS's aside", "<=", 5, "%",
     lambda r: batch.growth_percent(r["lines"])),
    ("p99 of token gaps beside a list, against alone", "<=", 2, "x", _gaps_over_alone),
)  # fmt: skip


def lines(results: Results) -> str:
    plan = results["plan"]
    config = plan["config"]
    what = (
        f"a random classifier of {config['num_layers']} layers x {config['units']} units;"
        f" {plan['texts']} texts of {plan['tokens']} tokens, {plan['callers']} clients over HTTP;"
        f" medians of {plan['rounds']} rounds"
    )
    speeds = ("", "texts/s", "largest difference of a probability", "labels as fp32's")
    gaps = ("gaps of streams' tokens", "p50, ms", "p99, ms", "the list's texts/s")
    tables = [
        (speeds, _speeds(results)),
        (gaps, _gaps(results)),
        (("", ""), _lines(results)),
    ]
    return report.page(results, what, tables)


def _speeds(results: Results) -> Iterator[Row]:
    for name in LABELS:
        if name in (measured := results.get("speeds", {})):
            error = same = ""
            if name in COMPARED and REFERENCE in measured:
                error = f"{_error(results, name):.1e}"
                labels, theirs = (probabilities(results, n).argmax(-1) for n in (name, REFERENCE))
                same = f"{(labels == theirs).mean():.1%} of {len(labels)}"
            yield LABELS[name], shown(rates(results, name), 1), error, same


def _gaps(results: Results) -> Iterator[Row]:
    for name, label in GAPS.items():
        if rounds := results.get("gaps", {}).get(name):
            each = [report.quantiles(one["gaps_s"]) for one in rounds]
            p50, p99 = (report.in_ms(one[key] for one in each) for key in ("p50", "p99"))
            texts = statistics.median(one["texts_per_s"] for one in rounds)
            yield label, shown(p50, 1), shown(p99, 1), f"{texts:.1f}" if texts else ""


def _lines(results: Results) -> Iterator[Row]:
    if "lines" in results:
        yield from batch.rows(results["lines"])
