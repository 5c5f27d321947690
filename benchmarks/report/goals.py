"""The numbers to reach, each as a ratio of two measurements of the same round of one run.

Speeds compare whole generations: prompt and all tokens. Only the floor is held against decode
steps, since it says nothing about prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Results = dict[str, Any]
# Its name, the sense and the limit, the unit, and the value in every round.
Goal = tuple[str, str, float, str, Callable[[Results], list[float]]]
INT8, FP32, MXNET = "onnxruntime-int8", "onnxruntime-fp32", "mxnet"


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def goals(results: Results, wanted: Sequence[Goal] = ()) -> Iterator[dict[str, Any]]:
    """Each goal with its value in every round, their spread, and whether the median meets it.

    `wanted` instead of `GOALS` for another kind of run. What was not measured has no `value`.
    """
    for name, sense, limit, unit, measure in wanted or GOALS:
        goal = {"name": name, "sense": sense, "limit": limit, "unit": unit}
        try:
            values = measure(results)
            value = spread(values)
        except (KeyError, ValueError):
            yield goal
            continue
        met = value["median"] >= limit if sense == ">=" else value["median"] <= limit
        yield {**goal, "rounds": values, "value": value, "met": met}


def _rounds(results: Results, name: str, rows: int, key: str) -> list[float]:
    found: list[float] = [
        entry[key] for entry in results["contenders"][name]["rows"][str(rows)]["rounds"]
    ]
    return found


def tokens_per_s(results: Results, name: str, rows: int) -> list[float]:
    """Of all rows together, in each round."""
    tokens = rows * results["plan"]["new_tokens"]
    return [tokens / seconds for seconds in _rounds(results, name, rows, "seconds")]


def step_ms(results: Results, name: str, rows: int) -> list[float]:
    """Of a decode step, in each round."""
    return [1000 * seconds for seconds in _rounds(results, name, rows, "step_s")]


def bandwidth(results: Results) -> list[float]:
    """Bytes per second, before and after each round: of the fastest way to read."""
    return [max(kernels.values()) for kernels in results["bandwidth"]["rounds"]]


def floor_ms(results: Results, name: str) -> float:
    """What reading the weights once takes, with the median of the run's bandwidths.

    Not the highest: the machines are shared, and a moment without neighbours is not what the steps
    had. Not round by round: a disturbed measurement would flatter that round.
    """
    size: int = results["contenders"][name]["weight_bytes"]
    return 1000 * size / statistics.median(bandwidth(results))


def _quotients(a: list[float], b: list[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=False)]


def _faster(name: str, than: str) -> Callable[[Results], list[float]]:
    return lambda r: _quotients(tokens_per_s(r, name, 1), tokens_per_s(r, than, 1))


def _batched(name: str) -> Callable[[Results], list[float]]:
    return lambda r: _quotients(tokens_per_s(r, name, 8), tokens_per_s(r, name, 1))


def _over_http(results: Results) -> list[float]:
    rates = [entry["tokens_per_s"] for entry in results["serving"]["rounds"]]
    return _quotients(rates, tokens_per_s(results, INT8, 8))


def _in_turns(results: Results) -> list[float]:
    return [r["turns_tokens_per_s"] / r["alone_tokens_per_s"] for r in results["turns"]["rounds"]]


def second_turn_ms(results: Results, engine: str, key: str = "chat_s") -> list[float]:
    """To the first token of a chat's second turn, in each round."""
    return [1000 * entry[engine][key][1] for entry in results["prefixes"]["rounds"]]


def answers(results: Results, engine: str, key: str) -> list[float]:
    """First tokens of several answers to one prompt against that of one answer."""
    found = []
    for entry in results["prefixes"]["rounds"]:
        several = entry[engine][f"answers_{entry['history'] // 4}"]
        found.append(several[key] / several["one_s"])
    return found


def _ready(kind: str) -> Callable[[Results], list[float]]:
    return lambda r: [entry["ready_s"] for entry in r["loading"][kind]]


def _memory(key: str) -> Callable[[Results], list[float]]:
    return lambda r: [r["memory"]["each"][key] / r["memory"]["weight_bytes"]]


def _overhead(model: str) -> Callable[[Results], list[float]]:
    return lambda r: [entry[f"overhead_{model}_ms"] for entry in r["serving"]["rounds"]]


GOALS: tuple[Goal, ...] = (
    ("int8, B=1, against the guides' loop", ">=", 30, "x", _faster(INT8, "guides")),
    ("int8, B=1, against llama.cpp Q8_0", ">=", 1.2, "x", _faster(INT8, "llama.cpp")),
    ("int8, B=1, against CTranslate2 int8", ">=", 1.2, "x", _faster(INT8, "ctranslate2")),
    (
        "int8, B=1, a decode step against the bandwidth floor",
        "<=",
        1.35,
        "x",
        lambda r: [ms / floor_ms(r, INT8) for ms in step_ms(r, INT8, 1)],
    ),
    ("fp32, B=1, against transformers fp32", ">=", 2, "x", _faster(FP32, "transformers")),
    ("mxnet, B=1, against the guides' loop", ">=", 5, "x", _faster(MXNET, "guides")),
    ("mxnet, B=8, tokens/s against its own B=1", ">=", 4, "x", _batched(MXNET)),
    ("int8, B=8, tokens/s against its own B=1", ">=", 3, "x", _batched(INT8)),
    ("clients over HTTP, tokens/s against in-process B=8", ">=", 1, "x", _over_http),
    ("models in turns, tokens/s against one alone", ">=", 0.85, "x", _in_turns),
    ("second turn of a chat, first token", "<=", 25, "ms", lambda r: second_turn_ms(r, "with")),
    ("first tokens of n = 8 against n = 1", "<=", 1.3, "x", lambda r: answers(r, "with", "all_s")),
    ("load of an int8 model, page cache warm", "<=", 0.2, "s", _ready("warm")),
    ("load of an int8 model, page cache cold", "<=", 0.4, "s", _ready("cold")),
    ("RSS of a further int8 model, against its weights", "<=", 1.2, "x", _memory("rss_bytes")),
    ("the anonymous part of it", "<=", 0.15, "x", _memory("anonymous_bytes")),
    ("HTTP overhead of a request, full-size model", "<=", 4, "ms", _overhead("full")),
    ("HTTP overhead of a request, tiny model", "<=", 4, "ms", _overhead("tiny")),
)
