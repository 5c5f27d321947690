"""What was measured of each request, and the numbers of many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (50, 90, 95, 99)
SLICES = 60  # points of the timeline


@dataclass(frozen=True)
class Sample:
    """One request. Seconds; `at_s` is when it was due, from the beginning of what is counted.

    first_token_s: only of streamed answers
    server_s: what the answer says that the model took
    error: what went wrong, None for an answer
    """

    model: str
    at_s: float
    seconds: float
    first_token_s: float | None = None
    tokens: int | None = None
    server_s: float | None = None
    error: str | None = None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    found = {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
    return {**found, "mean": sum(ordered) / len(ordered), "max": ordered[-1]}


def summary(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Latencies are of requests that were answered."""
    good = [s for s in samples if s.error is None]
    tokens = [s.tokens for s in good if s.tokens is not None]
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "requests_per_s": len(good) / seconds,
        "seconds": distribution(s.seconds for s in good),
        "first_token_s": distribution(s.first_token_s for s in good if s.first_token_s is not None),
        # Queues, cold starts, the network: everything but the model at work.
        "outside_model_s": distribution(
            max(s.seconds - s.server_s, 0) for s in good if s.server_s is not None
        ),
        "tokens": sum(tokens) if tokens else None,
        "tokens_per_s": sum(tokens) / seconds if tokens else None,
    }


def first_calls(samples: Iterable[Sample]) -> dict[str, float]:
    """How long the first answer of each model took, in this run."""
    first: dict[str, float] = {}
    for sample in sorted(samples, key=lambda s: s.at_s):
        if sample.error is None:
            first.setdefault(sample.model, sample.seconds)
    return first


def timeline(samples: Sequence[Sample], seconds: float) -> list[dict[str, Any]]:
    """Slices of the run, by when requests were due; the last has those that came late, too."""
    width = max(math.ceil(seconds / SLICES), 1)
    starts = range(0, math.ceil(seconds), width)
    slices = []
    for start in starts:
        part = [s for s in samples if min(s.at_s // width * width, starts[-1]) == start]
        found = summary(part, width)
        slices.append(
            {
                "at_s": start,
                "requests": found["requests"],
                "errors": found["errors"],
                "p50": found["seconds"] and found["seconds"]["p50"],
                "p99": found["seconds"] and found["seconds"]["p99"],
            }
        )
    return slices


def results(
    samples: Sequence[Sample], models: Sequence[str], shares: Sequence[float], seconds: float
) -> dict[str, Any]:
    """Everything that a report shows of the samples."""
    errors = Counter(s.error for s in samples if s.error is not None)
    first = first_calls(samples)
    return {
        "seconds": seconds,
        "all": summary(samples, seconds),
        "models": {
            model: {
                "share": share,
                "first_call_s": first.get(model),
                **summary([s for s in samples if s.model == model], seconds),
            }
            for model, share in zip(models, shares, strict=True)
        },
        "errors": [{"what": what, "count": count} for what, count in errors.most_common()],
        "timeline": timeline(samples, seconds),
    }
