"""Formats the results of a load test as text."""

from __future__ import annotations

from typing import Any

from command.tables import ms, percent, plain, table
from scripts.client.targets import Call, Target
from scripts.traffic.plan import Chooser, Plan
from scripts.traffic.samples import PERCENTILES, lookup

COLUMNS = [f"p{p}" for p in PERCENTILES]


def lines(results: dict[str, Any]) -> list[str]:
    """Format the results of a load test as tables and sentences."""
    output = [f"{sentence(results)}", ""]
    head = [
        "",
        "requests",
        "errors",
        *(f"{c} ms" for c in COLUMNS),
        "req/s",
        "tokens/s",
        "1st call",
    ]
    streamed = lookup(results, "all", "first_token_s") is not None
    if streamed:
        head += [f"token 1 {c}" for c in ("p50", "p99")]
    rows = [["all", *_cells(results["all"]), "", *_first_token(results["all"], streamed)]]
    for name, model in results["models"].items():
        first = ms(model["first_call_s"])
        rows.append([name or "-", *_cells(model), first, *_first_token(model, streamed)])
    output += [table(head, rows), ""]
    outside = lookup(results, "all", "outside_model_s")
    if outside:
        output.append(
            f"outside the model (queue, cold start, network): p50 {ms(outside['p50'])} ms,"
            f" p99 {ms(outside['p99'])} ms"
        )
    output.append(loads_sentence(results["loads"]))
    output += [f"error {e['what']}: {e['count']}" for e in results["errors"]]
    return output


def plan_lines(plan: Plan, target: Target) -> list[str]:
    """Format the plan and its first request."""
    shares = zip(plan.models, plan.shares(), strict=True)
    model, body = Chooser(plan, 1).next()
    call = Call(model or None, body, stream=plan.stream)
    return [
        table(["model", "share"], [[name or "-", percent(share)] for name, share in shares]),
        "",
        f"{rate(plan.users, plan.rate)} for {plan.seconds:g} s; the first call:",
        "",
        target.describe(call),
    ]


def rate(users: int, per_s: float | None) -> str:
    return f"{users} users" if per_s is None else f"{per_s:g} requests/s"


def _cells(part: dict[str, Any]) -> list[str]:
    latencies = [ms(lookup(part, "seconds", column)) for column in COLUMNS]
    counts = [str(part["requests"]), str(part["errors"])]
    return [*counts, *latencies, plain(part["requests_per_s"]), plain(part["tokens_per_s"])]


def _first_token(part: dict[str, Any], streamed: bool) -> list[str]:
    return [ms(lookup(part, "first_token_s", c)) for c in ("p50", "p99")] if streamed else []


def sentence(results: dict[str, Any]) -> str:
    """Format the plan of a load test in one sentence."""
    plan = results["plan"]
    how = rate(plan["users"], plan["rate"])
    models = f"{len(plan['models'])} models (Zipf {plan['zipf']:g})"
    return f"{plan['where']}: {models}, {how}, {results['seconds']:.0f} s"


def loads_sentence(loads: dict[str, Any]) -> str:
    if "unknown" in loads:
        return f"cold starts: not known ({loads['unknown']})"
    mean = loads.get("mean_s")
    took = "" if mean is None else f", {ms(mean)} ms on average"
    return f"cold starts ({loads['source']}): {loads['count']}{took}"
