"""What is made of the engine's measurements: tables, and goals.

A goal is a ratio of two measurements of the same round. Speeds compare whole generations: prompt
and all tokens. Only the floor is held against decode steps, since it says nothing about prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.engine.speeds import bandwidth, floor_ms, rounds, step_ms, tokens_per_s
from benchmarks.report.goals import Goal, Results, Values
from benchmarks.report.tables import Row, medians, page, shown, table

INT8, FP32, MXNET = "onnxruntime-int8", "onnxruntime-fp32", "mxnet"


def second_turn_ms(results: Results, engine: str, key: str = "chat_s") -> list[float]:
    """To the first token of a chat's second turn, in each round."""
    return [1000 * entry[engine][key][1] for entry in results["prefixes"]["rounds"]]


def answers(results: Results, engine: str, key: str) -> list[float]:
    """First tokens of several answers to one prompt against that of one answer."""
    rounds = results["prefixes"]["rounds"]
    several = [entry[engine][f"answers_{entry['history'] // 4}"] for entry in rounds]
    return [found[key] / found["one_s"] for found in several]


# Tables


def lines(results: Results) -> str:
    plan, config = results["plan"], results["plan"]["config"]
    what = (
        f"random model of {config['num_layers']} layers x {config['units']} units,"
        f" vocabulary {config['vocab_size']:,}; {plan['prompt_tokens']}-token prompt,"
        f" {plan['new_tokens']} new tokens; medians of {plan['rounds']} rounds (min-max)"
    )
    return page(results, what, _speed(results), table(("", ""), [*_others(results)]), _far(results))


def _speed(results: Results) -> Iterator[str]:
    head = "|B=1: ms per token|a decode step|its floor|tokens/s|B=8: tokens/s|first token, ms"
    rows = []
    for name, found in results["contenders"].items():
        if rates := tokens_per_s(results, name, 1):
            known = results.get("bandwidth", {}).get("rounds")
            cells = [
                found["label"],
                shown([1000 / rate for rate in rates], 1),
                f"{statistics.median(step_ms(results, name)):.1f}",
                f"{floor_ms(results, name):.1f}" if known else "",
                f"{statistics.median(rates):.0f}",
                shown(tokens_per_s(results, name, 8), 0) if "8" in found["rows"] else "",
                f"{1000 * statistics.median(rounds(results, name, 1, 'first_token_s')):.0f}",
                f"{found['weight_bytes'] / 1e6:.0f}",
            ]
            rows.append(cells)
    return table([*head.split("|"), "weights, MB"], rows)


def _others(results: Results) -> Iterator[Row]:
    if found := results.get("bandwidth"):
        each = ", ".join(f"{n} {rate / 1e9:.0f}" for n, rate in medians(found["rounds"]).items())
        rates = [rate / 1e9 for rate in bandwidth(results)]
        yield f"read bandwidth, GB/s ({each})", shown(rates, 1)
    if found := results.get("turns"):
        for label, key in (
            ("one model alone, one request", "alone"),
            (f"{found['models']} models in turns, one request each", "turns"),
            ("one model, 8 requests", "batch"),
        ):
            rates = [entry[f"{key}_tokens_per_s"] for entry in found["rounds"]]
            yield f"the engine, {label}: tokens/s", shown(rates, 0)
    if found := results.get("prefixes"):
        said = found["rounds"][-1]["history"]
        for engine, what in (("with", "with what is kept"), ("without", "without")):
            for label, key in (("after a pause", "chat_s"), ("at once", "chat_at_once_s")):
                values = second_turn_ms(results, engine, key)
                turn = f"a chat's second turn, {said} tokens of history, {label}"
                yield f"the engine {what}, {turn}: ms to the first token", shown(values, 0)
            for label, key in (("the first", "first_s"), ("the last", "all_s")):
                eight = f"eight answers to a prompt of {said // 4}: first token of {label}"
                values = answers(results, engine, key)
                yield f"the engine {what}, {eight} against one answer's", shown(values, 2)
    if found := results.get("uses"):
        for label, key in (
            ("8 rows, greedy", "greedy"),
            ("8 rows, sampled (temperature 0.8, top_p 0.95, top_k 50)", "sampled"),
            ("8 rows of 5 to 400 tokens that come and go, greedy", "ragged"),
        ):
            rates = [entry[f"{key}_tokens_per_s"] for entry in found["rounds"]]
            yield f"the engine, {label}: tokens/s", shown(rates, 0)
        for length in found["rounds"][0]["long_prompts_s"]:
            yield (
                f"the engine, a prompt of {length} tokens: ms to the first token",
                shown(_long_ms(results, length), 0),
            )
    if found := results.get("serving"):
        rates = [entry["tokens_per_s"] for entry in found["rounds"]]
        yield f"over HTTP, {found['clients']} clients of one model: tokens/s", shown(rates, 0)
        for model in ("full", "tiny"):
            values = _overhead(model)(results)
            yield f"HTTP overhead of a request, {model} model, ms", shown(values, 1)
    if found := results.get("loading"):
        for kind in ("warm", "cold"):
            for label, key in (("ready", "ready_s"), ("first token", "first_token_s")):
                values = [entry[key] for entry in found[kind]]
                yield f"load to {label}, page cache {kind}, s", shown(values, 3)
        yield "the very first load, which quantizes, s", f"{found['without_cache_s']:.1f}"
        again = f"{found['another_without_cache_s']:.1f}"
        yield "the same of another model of its shape, s", again
        size = f"{found['prepared_bytes'] / 1e6:.0f}"
        yield "what a prepared model takes of the disk, MB", size
    if found := results.get("memory"):
        yield "RSS of a further model, MB", f"{found['each']['rss_bytes'] / 1e6:.0f}"
        yield "the anonymous part of it, MB", f"{found['each']['anonymous_bytes'] / 1e6:.1f}"


def _far(results: Results) -> Iterator[str]:
    head = "int8 against fp32|greedy texts the same|likeliest token the same"
    head += "|logit error, rms (of their deviation)|largest|KL divergence"
    rows = [
        (
            name,
            f"{found['same_texts']} of {found['texts']}",
            f"{found['top1_agreement']:.2%} of {found['tokens']}",
            f"{found['rms_logit_error']:.3f} ({found['relative_logit_error']:.1%})",
            f"{found['max_logit_error']:.2f}",
            f"{found['kl_divergence']:.1e}",
        )
        for name, found in results.get("accuracy", {}).items()
    ]
    return table(head.split("|"), rows)


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
    rounds = results["uses"]["rounds"]
    return [r["sampled_tokens_per_s"] / r["greedy_tokens_per_s"] for r in rounds]


def _long_ms(results: Results, length: str) -> list[float]:
    return [1000 * entry["long_prompts_s"][length] for entry in results["uses"]["rounds"]]


def _to_floor(results: Results) -> list[float]:
    return [ms / floor_ms(results, INT8) for ms in step_ms(results, INT8)]


def _ready(kind: str) -> Values:
    return lambda r: [entry["ready_s"] for entry in r["loading"][kind]]


def _memory(key: str) -> Values:
    return lambda r: [r["memory"]["each"][key] / r["memory"]["weight_bytes"]]


def _overhead(model: str) -> Values:
    return lambda r: [entry[f"overhead_{model}_ms"] for entry in r["serving"]["rounds"]]


GOALS: tuple[Goal, ...] = (
    ("int8, B=1, against the guides' loop", ">=", 30, "x", _faster(INT8, "guides")),
    ("int8, B=1, against llama.cpp Q8_0", ">=", 1.2, "x", _faster(INT8, "llama.cpp")),
    ("int8, B=1, against CTranslate2 int8", ">=", 1.2, "x", _faster(INT8, "ctranslate2")),
    ("int8, B=1, a decode step against the bandwidth floor", "<=", 1.35, "x", _to_floor),
    ("fp32, B=1, against transformers fp32", ">=", 2, "x", _faster(FP32, "transformers")),
    ("mxnet, B=1, against the guides' loop", ">=", 5, "x", _faster(MXNET, "guides")),
    ("mxnet, B=8, tokens/s against its own B=1", ">=", 4, "x", _batched(MXNET)),
    ("int8, B=8, tokens/s against its own B=1", ">=", 3, "x", _batched(INT8)),
    ("clients over HTTP, tokens/s against in-process B=8", ">=", 1, "x", _over_http),
    ("models in turns, tokens/s against one alone", ">=", 0.85, "x", _in_turns),
    ("second turn of a chat, first token", "<=", 25, "ms", lambda r: second_turn_ms(r, "with")),
    ("first tokens of n = 8 against n = 1", "<=", 1.3, "x", lambda r: answers(r, "with", "all_s")),
    ("8 rows sampled, tokens/s against greedy", ">=", 0.9, "x", _sampled),
    ("a prompt of 1,000 tokens, first token", "<=", 600, "ms", lambda r: _long_ms(r, "1000")),
    ("load of an int8 model, page cache warm", "<=", 0.2, "s", _ready("warm")),
    ("load of an int8 model, page cache cold", "<=", 0.4, "s", _ready("cold")),
    ("RSS of a further int8 model, against its weights", "<=", 1.2, "x", _memory("rss_bytes")),
    ("the anonymous part of it", "<=", 0.15, "x", _memory("anonymous_bytes")),
    ("HTTP overhead of a request, full-size model", "<=", 4, "ms", _overhead("full")),
    ("HTTP overhead of a request, tiny model", "<=", 4, "ms", _overhead("tiny")),
)
