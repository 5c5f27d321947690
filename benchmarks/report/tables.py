"""The results as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.report import goals, machine

Results = dict[str, Any]


def lines(results: Results) -> Iterator[str]:
    plan = results["plan"]
    config = plan["config"]
    yield from machine.lines(results["machine"])
    yield (
        f"Random model of {config['num_layers']} layers x {config['units']} units,"
        f" vocabulary {config['vocab_size']:,}; {plan['prompt_tokens']}-token prompt,"
        f" {plan['new_tokens']} new tokens; medians of {plan['rounds']} rounds (min-max)"
    )
    yield ""
    if results["contenders"]:
        yield from _speed(results)
        yield ""
    if others := list(_others(results)):
        yield from ("| | |", "|---|---|", *others, "")
    if "accuracy" in results:
        yield from _accuracy(results)
        yield ""
    yield from goal_lines(results)
    for name, reason in results["skipped"].items():
        yield f"\nnot measured: {name} ({reason})"


def _speed(results: Results) -> Iterator[str]:
    yield (
        "| | B=1: ms per token | a decode step | its floor | tokens/s | B=8: tokens/s |"
        " first token, ms | weights, MB |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, found in results["contenders"].items():
        rates = goals.tokens_per_s(results, name, 1)
        if not rates:
            continue
        first = statistics.median(e["first_token_s"] for e in found["rows"]["1"]["rounds"])
        cells = [
            found["label"],
            shown([1000 / rate for rate in rates], 1),
            f"{statistics.median(goals.step_ms(results, name, 1)):.1f}",
            f"{goals.floor_ms(results, name):.1f}"
            if results.get("bandwidth", {}).get("rounds")
            else "",
            f"{statistics.median(rates):.0f}",
            shown(goals.tokens_per_s(results, name, 8), 0) if "8" in found["rows"] else "",
            f"{1000 * first:.0f}",
            f"{found['weight_bytes'] / 1e6:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _prefixes(results: Results) -> Iterator[str]:
    last = results["prefixes"]["rounds"][-1]
    said, length = last["history"], last["history"] // 4
    for engine, what in (("with", "with what is kept"), ("without", "without")):
        for label, key in (("after a pause", "chat_s"), ("at once", "chat_at_once_s")):
            values = goals.second_turn_ms(results, engine, key)
            yield (
                f"| the engine {what}, a chat's second turn, {said} tokens of history,"
                f" {label}: ms to the first token | {shown(values, 0)} |"
            )
        for label, key in (("the first", "first_s"), ("the last", "all_s")):
            yield (
                f"| the engine {what}, eight answers to a prompt of {length}: first token of"
                f" {label} against one answer's | {shown(goals.answers(results, engine, key), 2)} |"
            )


def _others(results: Results) -> Iterator[str]:
    if "bandwidth" in results:
        rates = [rate / 1e9 for rate in goals.bandwidth(results)]
        kernels = {
            name: statistics.median(entry[name] for entry in results["bandwidth"]["rounds"]) / 1e9
            for name in results["bandwidth"]["rounds"][0]
        }
        each = ", ".join(f"{name} {rate:.0f}" for name, rate in kernels.items())
        yield f"| read bandwidth, GB/s ({each}) | {shown(rates, 1)} |"
    if "turns" in results:
        rounds, models = results["turns"]["rounds"], results["turns"]["models"]
        for label, key in (
            ("one model alone, one request", "alone"),
            (f"{models} models in turns, one request each", "turns"),
            ("one model, 8 requests", "batch"),
        ):
            values = [entry[f"{key}_tokens_per_s"] for entry in rounds]
            yield f"| the engine, {label}: tokens/s | {shown(values, 0)} |"
    if "prefixes" in results:
        yield from _prefixes(results)
    if "serving" in results:
        rounds = results["serving"]["rounds"]
        rates = [entry["tokens_per_s"] for entry in rounds]
        clients = results["serving"]["clients"]
        yield f"| over HTTP, {clients} clients of one model: tokens/s | {shown(rates, 0)} |"
        for model in ("full", "tiny"):
            values = [entry[f"overhead_{model}_ms"] for entry in rounds]
            yield f"| HTTP overhead of a request, {model} model, ms | {shown(values, 1)} |"
    if "loading" in results:
        for kind in ("warm", "cold"):
            for label, key in (("ready", "ready_s"), ("first token", "first_token_s")):
                values = [entry[key] for entry in results["loading"][kind]]
                yield f"| load to {label}, page cache {kind}, s | {shown(values, 3)} |"
        loading = results["loading"]
        yield f"| the very first load, which quantizes, s | {loading['without_cache_s']:.1f} |"
        if "prepared_bytes" in loading:
            seconds, size = loading["another_without_cache_s"], loading["prepared_bytes"]
            yield f"| the same of another model of its shape, s | {seconds:.1f} |"
            yield f"| what a prepared model takes of the disk, MB | {size / 1e6:.0f} |"
    if "memory" in results:
        each = results["memory"]["each"]
        yield f"| RSS of a further model, MB | {each['rss_bytes'] / 1e6:.0f} |"
        yield f"| the anonymous part of it, MB | {each['anonymous_bytes'] / 1e6:.1f} |"


def _accuracy(results: Results) -> Iterator[str]:
    yield (
        "| int8 against fp32 | greedy texts the same | likeliest token the same |"
        " logit error, rms (of their deviation) | largest | KL divergence |"
    )
    yield "|---|---|---|---|---|---|"
    for name, found in results["accuracy"].items():
        yield (
            f"| {name} | {found['same_texts']} of {found['texts']}"
            f" | {found['top1_agreement']:.2%} of {found['tokens']}"
            f" | {found['rms_logit_error']:.3f} ({found['relative_logit_error']:.1%})"
            f" | {found['max_logit_error']:.2f} | {found['kl_divergence']:.1e} |"
        )


def goal_lines(results: Results) -> Iterator[str]:
    yield "| | goal | measured | met |"
    yield "|---|---|---|---|"
    for goal in results["goals"]:
        unit = "x" if goal["unit"] == "x" else f" {goal['unit']}"
        wanted = f"{goal['sense']} {goal['limit']:g}{unit}"
        if "value" in goal:
            met = "yes" if goal["met"] else "**no**"
            yield f"| {goal['name']} | {wanted} | {shown(goal['rounds'], 2)}{unit} | {met} |"
        else:
            yield f"| {goal['name']} | {wanted} | | not measured |"


def shown(values: list[float], digits: int) -> str:
    """The median, and between which values it is."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    found = goals.spread(values)
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"
