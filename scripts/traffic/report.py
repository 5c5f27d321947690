"""A run's results as text for a terminal, and as an HTML page that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from command.tables import get, ms, percent, plain, table
from scripts.client.targets import Call, Target
from scripts.traffic.plan import Chooser, Plan
from scripts.traffic.samples import PERCENTILES

COLUMNS = [f"p{p}" for p in PERCENTILES]
CHART = (720, 160)  # points


def lines(results: dict[str, Any]) -> list[str]:
    """For a terminal."""
    found = [f"{sentence(results)}", ""]
    head = [
        "",
        "requests",
        "errors",
        *(f"{c} ms" for c in COLUMNS),
        "req/s",
        "tokens/s",
        "1st call",
    ]
    streamed = get(results, "all", "first_token_s") is not None
    if streamed:
        head += [f"token 1 {c}" for c in ("p50", "p99")]
    rows = [["all", *_cells(results["all"]), "", *_first_token(results["all"], streamed)]]
    for name, model in results["models"].items():
        first = ms(model["first_call_s"])
        rows.append([name or "-", *_cells(model), first, *_first_token(model, streamed)])
    found += [table(head, rows), ""]
    outside = get(results, "all", "outside_model_s")
    if outside:
        found.append(
            f"outside the model (queue, cold start, network): p50 {ms(outside['p50'])} ms,"
            f" p99 {ms(outside['p99'])} ms"
        )
    found.append(loads_sentence(results["loads"]))
    found += [f"error {e['what']}: {e['count']}" for e in results["errors"]]
    return found


def plan_lines(plan: Plan, target: Target) -> list[str]:
    """What would be sent, for a terminal."""
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
    latencies = [ms(get(part, "seconds", column)) for column in COLUMNS]
    counts = [str(part["requests"]), str(part["errors"])]
    return [*counts, *latencies, plain(part["requests_per_s"]), plain(part["tokens_per_s"])]


def _first_token(part: dict[str, Any], streamed: bool) -> list[str]:
    return [ms(get(part, "first_token_s", c)) for c in ("p50", "p99")] if streamed else []


def sentence(results: dict[str, Any]) -> str:
    """What was done."""
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


def write_html(results: dict[str, Any], path: Path) -> None:
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"ms": ms, "plain": plain, "percent": percent}
    template = environment.get_template("report.html")
    page = template.render(
        results=results,
        sentence=sentence(results),
        loads=loads_sentence(results["loads"]),
        columns=COLUMNS,
        chart=chart(results["timeline"]),
    )
    path.write_text(page, encoding="utf-8")


def chart(slices: list[dict[str, Any]]) -> dict[str, Any]:
    """Points of the latency lines and bars of the requests, for an SVG of the size `CHART`."""
    width, height = CHART
    slowest = max((s["p99"] for s in slices if s["p99"]), default=0.0)
    most = max((s["requests"] for s in slices), default=0)
    step = width / max(len(slices), 1)
    found: dict[str, Any] = {"width": width, "height": height, "slowest": slowest, "most": most}
    for name in ("p50", "p99"):
        found[name] = " ".join(
            f"{(i + 0.5) * step:.1f},{height - s[name] / slowest * height:.1f}"
            for i, s in enumerate(slices)
            if s[name]
        )
    found["bars"] = [
        {
            "x": round(i * step, 1),
            "width": round(step * 0.9, 1),
            "height": round(s["requests"] / most * height, 1) if most else 0,
            "errors": round(s["errors"] / most * height, 1) if most else 0,
        }
        for i, s in enumerate(slices)
    ]
    return found
