"""The measurements of requests, and their statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Sample:
    """The measurements of one request, in seconds.

    at_s: when the request was due, from the start of the measurement
    first_token_s: of streams only
    server_s: the model's time as the answer reports it
    error: kind of error, None for an answer
    """

    model: str
    at_s: float
    seconds: float
    first_token_s: float | None = None
    tokens: int | None = None
    server_s: float | None = None
    error: str | None = None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank)."""
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    percentiles = {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
    return {**percentiles, "mean": sum(ordered) / len(ordered), "max": ordered[-1]}


def summary(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """The counts, rates, and latencies of the answered requests."""
    good = [s for s in samples if s.error is None]
    tokens = [s.tokens for s in good if s.tokens is not None]
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "requests_per_s": len(good) / seconds,
        "seconds": distribution(s.seconds for s in good),
        "first_token_s": distribution(s.first_token_s for s in good if s.first_token_s is not None),
        # Time in queues, in cold starts and in the network.
        "outside_model_s": distribution(
            max(s.seconds - s.server_s, 0) for s in good if s.server_s is not None
        ),
        "tokens": sum(tokens) if tokens else None,
        "tokens_per_s": sum(tokens) / seconds if tokens else None,
    }


def first_calls(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the latency in seconds of each model's first answer."""
    first: dict[str, float] = {}
    for sample in sorted(samples, key=lambda s: s.at_s):
        if sample.error is None:
            first.setdefault(sample.model, sample.seconds)
    return first


def results(
    samples: Sequence[Sample], models: Sequence[str], shares: Sequence[float], seconds: float
) -> dict[str, Any]:
    """The report's numbers, for all models together and each alone."""
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
    }


def lookup(value: Any, *path: str) -> Any:
    """The value at a path of nested dicts, None if a part is missing."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
