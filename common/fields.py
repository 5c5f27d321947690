"""Checks of single fields of a request. Each raises `InvalidRequest`, which names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_BAD_WORD_IDS = 1024


def wrong(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {reason}", field=field)


def kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, f"must be true or false, is {kind(value)}")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Check a JSON object."""
    if not isinstance(value, Mapping):
        raise wrong(name, f"must be an object, is {kind(value)}")
    return value


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Check an integer from `low` to `high`; 3.0 is 3, because JSON has one kind of number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(name, f"must be an integer, is {kind(value)}")
    if not low <= value <= high:
        raise wrong(name, f"must be from {low} to {high}, is {value}")
    return value


def number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """Check a number from `low` to `high`; with `above`, `low` itself is not allowed."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(name, f"must be a number, is {kind(value)}")
    if not low <= value <= high or not math.isfinite(value) or (above and value == low):
        bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise wrong(name, f"must be {bounds}, is {value}")
    return float(value)


def top_k(name: str, value: Any) -> int:
    """Check `top_k`; 0 and -1 mean all tokens, as in vLLM and transformers' configs."""
    return max(integer(name, value, -1, 1_000_000), 0)


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Check an object of biases; returns pairs of a token id and the number added to its logit."""
    if not isinstance(value, Mapping):
        raise wrong(name, f"must be an object of token ids, is {kind(value)}")
    if len(value) > MAX_BIASES:
        raise wrong(name, f"has {len(value)} tokens, at most {MAX_BIASES} are allowed")
    for token in value:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise wrong(name, f"has the key {token!r:.50}, must have token ids")
    return tuple(
        (int(token), number(f"{name}.{token}", bias, -MAX_BIAS, MAX_BIAS))
        for token, bias in value.items()
    )


def stops(name: str, value: Any) -> tuple[str, ...]:
    """Check the texts at which an answer ends."""
    return texts(name, value, MAX_STOPS, MAX_STOP_CHARACTERS)


def texts(name: str, value: Any, most: int, longest: int) -> tuple[str, ...]:
    """Check one text or a list of at most `most` texts, each of 1 to `longest` characters."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(text, str) for text in values):
        raise wrong(name, f"must be a string or a list of strings, is {kind(value)}")
    if len(values) > most:
        raise wrong(name, f"has {len(values)} strings, at most {most} are allowed")
    for text in values:
        if not 1 <= len(text) <= longest:
            raise wrong(name, f"strings must have 1 to {longest} characters")
    return tuple(values)


def bad_words_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Check the sequences of token ids that an answer must not contain."""
    if not isinstance(value, list | tuple) or not all(isinstance(v, list | tuple) for v in value):
        raise wrong(name, f"must be a list of lists of token ids, is {kind(value)}")
    if sum(map(len, value)) > MAX_BAD_WORD_IDS:
        raise wrong(name, f"has more than the {MAX_BAD_WORD_IDS} token ids that are allowed")
    if not all(value):
        raise wrong(name, "has an empty list, must have lists of token ids")
    return tuple(tuple(integer(name, i, 0, 10**9) for i in ids) for ids in value)
