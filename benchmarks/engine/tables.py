"""Tables and goals of the engine's measurements.

A goal is a ratio of two measurements of the same round. Speeds compare whole generations: prompt
and all tokens. Only the floor is held against decode steps, since it says nothing about prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import profile
from benchmarks.engine.speeds import floor_ms, rounds, step_ms, tokens_per_s
from benchmarks.engine.uses import RATES
from benchmarks.report import tables as report
from benchmarks.report.tables import Goal, Results, Row, Table, Values, mb, ratios, shown

INT8, FP32, MXNET = "int8", "fp32", "mxnet"


def of_rounds(results: Results, *path: str) -> list[Any]:
    """Return the value of the path's last key in each round of the part at the path."""
    *place, key = path
    for name in place:
        results = results[name]
    return [entry[key] for entry in results["rounds"]]


def second_turn_ms(results: Results, system: str, key: str = "chat_s") -> list[float]:
    """Return the milliseconds to the first token of a chat's second turn, in each round."""
    return [1000 * firsts[1] for firsts in of_rounds(results, "uses", system, key)]


def answers(results: Results, system: str) -> list[float]:
    """Return the time to the first tokens of several answers over that of one, in each round."""
    measured = of_rounds(results, "uses", system, "answers")
    return [each["all_s"] / each["one_s"] for each in measured]


def long_ms(results: Results, system: str, length: str) -> list[float]:
    return [1000 * each[length] for each in of_rounds(results, "uses", system, "long_prompts_s")]


def rate(results: Results, system: str, use: str) -> list[float]:
    """Return the tokens per second of 8 clients, in each round."""
    return of_rounds(results, "uses", system, f"{use}_tokens_per_s")


# Tables


def lines(results: Results) -> str:
    what = f"random model of {report.sizes(results['plan'])} (min-max)"
    return report.page(results, what, [table(results) for table in TABLES])


def speeds(results: Results) -> Table:
    head = "|B=1: ms per token|a decode step|its floor|tokens/s|B=8: tokens/s|first token, ms"
    rows = []
    for name, measured in results["contenders"].items():
        if rates := tokens_per_s(results, name, 1):
            cells = [
                measured["label"],
                shown([1000 / rate for rate in rates], 1),
                f"{statistics.median(step_ms(results, name)):.1f}",
                _cell(partial(floor_ms, results, name), 1),
                f"{statistics.median(rates):.0f}",
                shown(tokens_per_s(results, name, 8), 0) if "8" in measured["rows"] else "",
                f"{1000 * statistics.median(rounds(results, name, 1, 'first_token_s')):.0f}",
                mb(measured["weight_bytes"]),
            ]
            rows.append(cells)
    return [*head.split("|"), "weights, MB"], rows


def uses(results: Results) -> Table:
    """Return a table with a row for each system; first tokens are in milliseconds."""
    measured = results.get("uses", {})
    lengths = [*next(iter(measured.values()))["rounds"][0]["long_prompts_s"]] if measured else []
    columns: dict[str, Callable[[str], list[float]]] = {
        **{f"8 rows, {use}: tokens/s": partial(rate, results, use=use) for use in RATES},
        **{f"{n} tokens: ms": partial(long_ms, results, length=n) for n in lengths},
        "second turn: ms": partial(second_turn_ms, results),
        "at once": partial(second_turn_ms, results, key="chat_at_once_s"),
        "n = 8": partial(answers, results),
    }
    rows = [
        [
            system["label"],
            *(
                _cell(partial(values, name), 2 if head == "n = 8" else 0)
                for head, values in columns.items()
            ),
        ]
        for name, system in measured.items()
    ]
    return ["what people send", *columns], rows


def _cell(values: Callable[[], list[float]], digits: int) -> str:
    """Format values for a table; return "" if they were not measured."""
    try:
        return shown(values(), digits)
    except (KeyError, ValueError):
        return ""


def others(results: Results) -> Table:
    return ("", ""), _others(results)


def _others(results: Results) -> Iterator[Row]:
    if (measured := results.get("bandwidth")) and measured["rounds"]:
        rates = [max(each.values()) / 1e9 for each in measured["rounds"]]
        kernels = report.medians(measured["rounds"])
        each = ", ".join(f"{name} {value / 1e9:.0f}" for name, value in kernels.items())
        yield f"read bandwidth, GB/s ({each})", shown(rates, 1)
    if measured := results.get("turns"):
        for label, key in (
            ("one model alone, one request", "alone"),
            (f"{measured['models']} models in turns, one request each", "turns"),
            ("one model, 8 requests", "batch"),
        ):
            rates = of_rounds(results, "turns", f"{key}_tokens_per_s")
            yield f"the engine, {label}: tokens/s", shown(rates, 0)
    if measured := results.get("speculation"):
        for right in measured["rounds"][0]["1"]:
            label = f"{measured['guesses']} guesses in a pass, {float(right):.0%} right"
            values = [entry["1"][right] for entry in measured["rounds"]]
            yield f"{label}, rows: 1; speed against none", shown(values, 2)
    if measured := results.get("serving"):
        rates = of_rounds(results, "serving", "tokens_per_s")
        yield f"over HTTP, {measured['clients']} clients of one model: tokens/s", shown(rates, 0)
        for model in ("full", "tiny"):
            values = of_rounds(results, "serving", f"overhead_{model}_ms")
            yield f"HTTP overhead of a request, {model} model, ms", shown(values, 1)
    if measured := results.get("loading"):
        for kind in ("warm", "cold"):
            for label, key in (("ready", "ready_s"), ("first token", "first_token_s")):
                values = [entry[key] for entry in measured[kind]]
                yield f"load to {label}, page cache {kind}, s", shown(values, 3)
        yield "the very first load, which quantizes, s", f"{measured['without_cache_s']:.1f}"
        another = f"{measured['another_without_cache_s']:.1f}"
        yield "the same of another model of its shape, s", another
        yield "what a prepared model takes of the disk, MB", mb(measured["prepared_bytes"])
    if measured := results.get("memory"):
        yield "RSS of a further model, MB", mb(measured["each"]["rss_bytes"])
        yield "the anonymous part of it, MB", mb(measured["each"]["anonymous_bytes"], 1)


def far(results: Results) -> Table:
    head = "int8 against fp32|greedy texts the same|likeliest token the same"
    head += "|logit error, rms (of their deviation)|largest|KL divergence"
    rows = [
        (
            name,
            f"{measured['same_texts']} of {measured['texts']}",
            f"{measured['top1_agreement']:.2%} of {measured['tokens']}",
            f"{measured['rms_logit_error']:.3f} ({measured['relative_logit_error']:.1%})",
            f"{measured['max_logit_error']:.2f}",
            f"{measured['kl_divergence']:.1e}",
        )
        for name, measured in results.get("accuracy", {}).items()
    ]
    return head.split("|"), rows


def operators(results: Results) -> Table:
    """Return the table of `kogpt2 profile` for the full-size model in int8."""
    if measured := results.get("profile"):
        return profile.table(measured)
    return (), ()


TABLES = (speeds, uses, others, far, operators)

# Goals


def _faster(name: str, than: str) -> Values:
    return lambda r: ratios(tokens_per_s(r, name, 1), tokens_per_s(r, than, 1))


def _best(results: Results) -> list[float]:
    """Return the speed of eight equal rows over that of the fastest peer, in each round."""
    others = zip(*(tokens_per_s(results, other, 8) for other in PEERS), strict=True)
    return ratios(tokens_per_s(results, INT8, 8), map(max, others))


def _ragged(results: Results) -> list[float]:
    """Return the smaller speedup of the engine over OpenVINO and the server over llama.cpp."""
    ours = [rate(results, name, "ragged") for name in ("engine", "server")]
    theirs = [rate(results, name, "ragged") for name in ("openvino-genai", "llama-server")]
    return [min(pair) for pair in zip(*map(ratios, ours, theirs), strict=True)]


def _ready(kind: str) -> Values:
    return lambda r: [entry["ready_s"] for entry in r["loading"][kind]]


def _memory(key: str) -> Values:
    return lambda r: [r["memory"]["each"][key] / r["memory"]["weight_bytes"]]


def _overhead(model: str) -> Values:
    return lambda r: of_rounds(r, "serving", f"overhead_{model}_ms")


def _over_http(results: Results) -> list[float]:
    rates = of_rounds(results, "serving", "tokens_per_s")
    return ratios(rates, tokens_per_s(results, INT8, 8))


def _long_contexts(results: Results) -> list[float]:
    """Return the time of a step of eight long rows over that of reading its bytes, by round."""
    *_, step = results["profile"].values()  # the last case of EngineRun.profile
    rates = [max(measured.values()) for measured in results["bandwidth"]["rounds"]]
    return [step["seconds"][profile.ALL] * rate / step["read_bytes"][profile.ALL] for rate in rates]


PEERS = ("llama.cpp", "openvino", "ctranslate2")
GOALS: Sequence[Goal] = (
    ("int8, B=1, against the guides' loop", ">=", 30, "x", _faster(INT8, "guides")),
    ("int8, B=1, against llama.cpp Q8_0", ">=", 1.4, "x", _faster(INT8, "llama.cpp")),
    ("int8, B=1, against OpenVINO int8", ">=", 1.5, "x", _faster(INT8, "openvino")),
    ("int8, B=1, against CTranslate2 int8", ">=", 2.8, "x", _faster(INT8, "ctranslate2")),
    ("int8, B=8, equal rows, against the best of them", ">=", 1.3, "x", _best),
    ("int8, ragged rows, against the best of them", ">=", 1.5, "x", _ragged),
    ("int8, B=8, tokens/s against its own B=1", ">=", 3.5, "x",
     lambda r: ratios(tokens_per_s(r, INT8, 8), tokens_per_s(r, INT8, 1))),
    ("int8, B=1, a decode step against the bandwidth floor", "<=", 1.35, "x",
     lambda r: ratios(step_ms(r, INT8), floor_ms(r, INT8))),
    ("int8, B=8, 900 tokens behind each, a step against the floor", "<=", 1.15, "x",
     _long_contexts),
    ("second turn of a chat, first token", "<=", 25, "ms", lambda r: second_turn_ms(r, "engine")),
    ("first tokens of n = 8 against n = 1", "<=", 1.3, "x", lambda r: answers(r, "engine")),
    ("8 rows sampled, tokens/s against greedy", ">=", 0.9, "x",
     lambda r: ratios(rate(r, "engine", "sampled"), rate(r, "engine", "greedy"))),
    ("a prompt of 1,000 tokens, first token", "<=", 600, "ms",
     lambda r: long_ms(r, "engine", "1000")),
    ("fp32, B=1, against transformers fp32", ">=", 2, "x", _faster(FP32, "transformers")),
    ("int8, B=1, by MXNet's operator against the library", ">=", 0.95, "x", _faster(MXNET, INT8)),
    ("HTTP overhead of a request, full-size model", "<=", 3, "ms", _overhead("full")),
    ("HTTP overhead of a request, tiny model", "<=", 3, "ms", _overhead("tiny")),
    ("clients over HTTP, tokens/s against in-process B=8", ">=", 1, "x", _over_http),
    ("models in turns, tokens/s against one alone", ">=", 0.85, "x",
     lambda r: ratios(*(of_rounds(r, "turns", f"{n}_tokens_per_s") for n in ("turns", "alone")))),
    ("load of an int8 model, page cache warm", "<=", 0.2, "s", _ready("warm")),
    ("load of an int8 model, page cache cold", "<=", 0.4, "s", _ready("cold")),
    ("RSS of a further int8 model, against its weights", "<=", 1.2, "x", _memory("rss_bytes")),
    ("the anonymous part of it", "<=", 0.15, "x", _memory("anonymous_bytes")),
)  # fmt: skip
