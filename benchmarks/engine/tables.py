"""What is made of the engine's measurements: tables, and goals.

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
from benchmarks.report.goals import Goal, Results, Values
from benchmarks.report.tables import Row, medians, page, shown, table

INT8, FP32, MXNET = "int8", "fp32", "mxnet"


def _uses(results: Results, system: str) -> list[dict[str, Any]]:
    """A system's rounds in what people send."""
    measured: list[dict[str, Any]] = results["uses"][system]["rounds"]
    return measured


def second_turn_ms(results: Results, system: str, key: str = "chat_s") -> list[float]:
    """To the first token of a chat's second turn, in each round."""
    return [1000 * entry[key][1] for entry in _uses(results, system)]


def answers(results: Results, system: str) -> list[float]:
    """First tokens of several answers to one prompt against that of one answer."""
    measured = [entry["answers"] for entry in _uses(results, system)]
    return [each["all_s"] / each["one_s"] for each in measured]


def long_ms(results: Results, system: str, length: str) -> list[float]:
    return [1000 * entry["long_prompts_s"][length] for entry in _uses(results, system)]


def rate(results: Results, system: str, use: str) -> list[float]:
    """Tokens per second of 8 clients."""
    return [entry[f"{use}_tokens_per_s"] for entry in _uses(results, system)]


# Tables


def lines(results: Results) -> str:
    plan, config = results["plan"], results["plan"]["config"]
    what = (
        f"random model of {config['num_layers']} layers x {config['units']} units,"
        f" vocabulary {config['vocab_size']:,}; {plan['prompt_tokens']}-token prompt,"
        f" {plan['new_tokens']} new tokens; medians of {plan['rounds']} rounds (min-max)"
    )
    rest = table(("", ""), [*others(results)])
    of_int8 = (far(results), operators(results))
    return page(results, what, speeds(results), uses(results), rest, *of_int8)


def speeds(results: Results) -> Iterator[str]:
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
                f"{measured['weight_bytes'] / 1e6:.0f}",
            ]
            rows.append(cells)
    return table([*head.split("|"), "weights, MB"], rows)


def uses(results: Results) -> Iterator[str]:
    """A row for each system; first tokens in milliseconds."""
    measured = results.get("uses", {})
    lengths = [*next(iter(measured.values()))["rounds"][0]["long_prompts_s"]] if measured else []
    columns: dict[str, Callable[[str], list[float]]] = {
        **{f"8 rows, {use}: tokens/s": partial(rate, results, use=use) for use in RATES},
        **{f"{n} tokens: ms": partial(long_ms, results, length=n) for n in lengths},
        "second turn: ms": partial(second_turn_ms, results),
        "at once": partial(second_turn_ms, results, key="chat_at_once_s"),
        "n = 8": partial(answers, results),
    }
    rows = []
    for name, system in measured.items():
        cells = [system["label"]]
        for head, values in columns.items():
            cells.append(_cell(partial(values, name), 2 if head == "n = 8" else 0))
        rows.append(cells)
    return table(["what people send", *columns], rows)


def _cell(values: Callable[[], list[float]], digits: int) -> str:
    """Empty where it was not measured."""
    try:
        return shown(values(), digits)
    except (KeyError, ValueError):
        return ""


def others(results: Results) -> Iterator[Row]:
    if (measured := results.get("bandwidth")) and measured["rounds"]:
        rates = [max(kernels.values()) / 1e9 for kernels in measured["rounds"]]
        each = ", ".join(f"{n} {rate / 1e9:.0f}" for n, rate in medians(measured["rounds"]).items())
        yield f"read bandwidth, GB/s ({each})", shown(rates, 1)
    if measured := results.get("turns"):
        for label, key in (
            ("one model alone, one request", "alone"),
            (f"{measured['models']} models in turns, one request each", "turns"),
            ("one model, 8 requests", "batch"),
        ):
            rates = [entry[f"{key}_tokens_per_s"] for entry in measured["rounds"]]
            yield f"the engine, {label}: tokens/s", shown(rates, 0)
    if measured := results.get("speculation"):
        for rows, rates in measured["rounds"][0].items():
            for right in rates:
                values = [entry[rows][right] for entry in measured["rounds"]]
                label = f"{measured['guesses']} guesses in a pass, {float(right):.0%} right"
                yield f"{label}, rows: {rows}; speed against none", shown(values, 2)
    if measured := results.get("serving"):
        rates = [entry["tokens_per_s"] for entry in measured["rounds"]]
        yield f"over HTTP, {measured['clients']} clients of one model: tokens/s", shown(rates, 0)
        for model in ("full", "tiny"):
            values = _overhead(model)(results)
            yield f"HTTP overhead of a request, {model} model, ms", shown(values, 1)
    if measured := results.get("loading"):
        for kind in ("warm", "cold"):
            for label, key in (("ready", "ready_s"), ("first token", "first_token_s")):
                values = [entry[key] for entry in measured[kind]]
                yield f"load to {label}, page cache {kind}, s", shown(values, 3)
        for label, key, unit, digits in (
            ("the very first load, which quantizes, s", "without_cache_s", 1, 1),
            ("the same of another model of its shape, s", "another_without_cache_s", 1, 1),
            ("what a prepared model takes of the disk, MB", "prepared_bytes", 1e6, 0),
        ):
            if key in measured:
                yield label, f"{measured[key] / unit:.{digits}f}"
    if measured := results.get("memory"):
        yield "RSS of a further model, MB", f"{measured['each']['rss_bytes'] / 1e6:.0f}"
        yield "the anonymous part of it, MB", f"{measured['each']['anonymous_bytes'] / 1e6:.1f}"


def far(results: Results) -> Iterator[str]:
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
    return table(head.split("|"), rows)


def operators(results: Results) -> Iterator[str]:
    """What `kogpt2 profile` shows, of the full-size model in int8."""
    if measured := results.get("profile"):
        yield from profile.lines(measured["steps"], measured["read_bytes"])


# Goals


def _quotients(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=False)]


def _faster(name: str, than: str) -> Values:
    return lambda r: _quotients(tokens_per_s(r, name, 1), tokens_per_s(r, than, 1))


def _batched(name: str) -> Values:
    return lambda r: _quotients(tokens_per_s(r, name, 8), tokens_per_s(r, name, 1))


def _over_http(results: Results) -> list[float]:
    rates = [entry["tokens_per_s"] for entry in results["serving"]["rounds"]]
    return _quotients(rates, tokens_per_s(results, INT8, 8))


def _in_turns(results: Results) -> list[float]:
    return [r["turns_tokens_per_s"] / r["alone_tokens_per_s"] for r in results["turns"]["rounds"]]


def _sampled(results: Results) -> list[float]:
    return _quotients(rate(results, "engine", "sampled"), rate(results, "engine", "greedy"))


def _best(name: str, than: Sequence[str]) -> Values:
    """Eight equal rows against the fastest of the others in each round."""

    def ratios(results: Results) -> list[float]:
        others = zip(*(tokens_per_s(results, other, 8) for other in than), strict=True)
        return _quotients(tokens_per_s(results, name, 8), [max(rates) for rates in others])

    return ratios


def _ragged(results: Results) -> list[float]:
    """The engine against OpenVINO's, the server against llama.cpp's: the smaller ratio."""
    ours = [rate(results, name, "ragged") for name in ("engine", "server")]
    theirs = [rate(results, name, "ragged") for name in ("openvino-genai", "llama-server")]
    return [min(pair) for pair in zip(*map(_quotients, ours, theirs), strict=True)]


def _to_floor(results: Results) -> list[float]:
    return _quotients(step_ms(results, INT8), floor_ms(results, INT8))


def _ready(kind: str) -> Values:
    return lambda r: [entry["ready_s"] for entry in r["loading"][kind]]


def _memory(key: str) -> Values:
    return lambda r: [r["memory"]["each"][key] / r["memory"]["weight_bytes"]]


def _overhead(model: str) -> Values:
    return lambda r: [entry[f"overhead_{model}_ms"] for entry in r["serving"]["rounds"]]


def _thousand(results: Results) -> list[float]:
    return long_ms(results, "engine", "1000")


def _by_operator(results: Results) -> list[float]:
    return _quotients(tokens_per_s(results, MXNET, 1), tokens_per_s(results, INT8, 1))


PEERS = ("llama.cpp", "openvino", "ctranslate2")
GOALS: tuple[Goal, ...] = (
    ("int8, B=1, against the guides' loop", ">=", 30, "x", _faster(INT8, "guides")),
    ("int8, B=1, against llama.cpp Q8_0", ">=", 1.4, "x", _faster(INT8, "llama.cpp")),
    ("int8, B=1, against OpenVINO int8", ">=", 1.5, "x", _faster(INT8, "openvino")),
    ("int8, B=1, against CTranslate2 int8", ">=", 2.8, "x", _faster(INT8, "ctranslate2")),
    ("int8, B=8, equal rows, against the best of them", ">=", 1.3, "x", _best(INT8, PEERS)),
    ("int8, ragged rows, against the best of them", ">=", 1.5, "x", _ragged),
    ("int8, B=8, tokens/s against its own B=1", ">=", 3.5, "x", _batched(INT8)),
    ("int8, B=1, a decode step against the bandwidth floor", "<=", 1.35, "x", _to_floor),
    ("second turn of a chat, first token", "<=", 25, "ms", lambda r: second_turn_ms(r, "engine")),
    ("first tokens of n = 8 against n = 1", "<=", 1.3, "x", lambda r: answers(r, "engine")),
    ("8 rows sampled, tokens/s against greedy", ">=", 0.9, "x", _sampled),
    ("a prompt of 1,000 tokens, first token", "<=", 600, "ms", _thousand),
    ("fp32, B=1, against transformers fp32", ">=", 2, "x", _faster(FP32, "transformers")),
    ("int8, B=1, by MXNet's operator against the library", ">=", 0.95, "x", _by_operator),
    ("HTTP overhead of a request, full-size model", "<=", 3, "ms", _overhead("full")),
    ("HTTP overhead of a request, tiny model", "<=", 3, "ms", _overhead("tiny")),
    ("clients over HTTP, tokens/s against in-process B=8", ">=", 1, "x", _over_http),
    ("models in turns, tokens/s against one alone", ">=", 0.85, "x", _in_turns),
    ("load of an int8 model, page cache warm", "<=", 0.2, "s", _ready("warm")),
    ("load of an int8 model, page cache cold", "<=", 0.4, "s", _ready("cold")),
    ("RSS of a further int8 model, against its weights", "<=", 1.2, "x", _memory("rss_bytes")),
    ("the anonymous part of it", "<=", 0.15, "x", _memory("anonymous_bytes")),
)
