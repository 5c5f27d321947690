"""What the rounds of a trace say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.run import Results
from benchmarks.switching.clients import STATES
from benchmarks.switching.trace import policies, replay
from common.eviction import Held


def each_further(before: Results, after: Results, models: int) -> Results:
    """What each of so many models added, on average, by kind of process."""
    return {
        kind: {
            key: (counts[key] - before["by_kind"].get(kind, {}).get(key, 0)) / max(models, 1)
            for key in ("rss", "pss", "anonymous")
        }
        for kind, counts in after["by_kind"].items()
    }


def joined(rounds: list[Results]) -> Results:
    """The rounds, with statistics of all their requests together."""
    requests = [a for one in rounds for a in one["requests"]]
    states = {state: [a["first_s"] for a in requests if a["state"] == state] for state in STATES}
    everything = {"all": [a["first_s"] for a in requests if not a["error"]]}
    against = [one["tokens_per_s"] / (one["alone_tokens_per_s"] or math.inf) for one in rounds]
    capacity = max(one["at_once"] for one in rounds)
    return {
        "rounds": rounds,
        "first_token_s": {
            state: quantiles(values)
            for state, values in {**everything, **states}.items()
            if values or state == "all"
        },
        "tokens_per_s": statistics.median(one["tokens_per_s"] for one in rounds),
        "against_alone": statistics.median(against),
        "at_once": capacity,
        "hits": hits(rounds, capacity),
        "faults": {
            key: sum(one["faults"][key] for one in rounds)
            for key in ("wrong", "lost", "4xx", "5xx")
        },
    }


def hits(rounds: list[Results], capacity: int) -> dict[str, float]:
    """The share of requests that found their model hot, and what caches of that room would have."""
    requests = [a for one in rounds for a in one["requests"]]
    measured = sum(a["state"] == "hot" for a in requests) / max(len(requests), 1)
    order = [*rounds[0]["warm_up"], *(a["model"] for a in rounds[0]["requests"])]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(order))}
    trace = [numbers[name] for name in order]
    counted = len(trace) / max(len(rounds[0]["requests"]), 1)  # none of the warm-up is a hit
    models = dict.fromkeys(numbers.values(), Held(1, 1.0))
    return {"measured": measured} | {
        name: counted * replay(policy, trace, models, max(capacity, 1))[0]
        for name, policy in policies(trace, models).items()
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        value = values[0] if values else float("nan")
        return {"count": len(values)} | dict.fromkeys(("p50", "p90", "p99", "most"), value)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "most": max(values)}
    return {"count": len(values), **named}
