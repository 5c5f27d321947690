"""Checks of single fields. Each raises `Refused`, which names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from common.parameters import MAX_BIAS, MAX_BIASES, MAX_STOP_CHARACTERS, MAX_STOPS
from serving.api.openai.errors import Refused


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(name, "must be text")
    if "\0" in value:
        raise Refused(name, "must be text without NUL")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused(name, "must be true or false")
    return value


def integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(name, "must be an integer")
    if not low <= value <= high:
        raise Refused(name, f"must be from {low} to {high}, is {value}")
    return value


def number(name: str, value: Any, low: float, high: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Refused(name, "must be a number")
    if not low <= value <= high:
        raise Refused(name, f"must be from {low} to {high}, is {value}")
    return float(value)


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused(name, "must be an object")
    return value


def stops(name: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > MAX_STOPS:
        raise Refused(name, f"must be text or a list of at most {MAX_STOPS} texts")
    for stop in found:
        if not 1 <= len(text(name, stop)) <= MAX_STOP_CHARACTERS:
            raise Refused(name, f"has a text that has not 1 to {MAX_STOP_CHARACTERS} characters")
    return found


def biases(name: str, value: Any) -> Mapping[str, float]:
    if len(mapping(name, value)) > MAX_BIASES:
        raise Refused(name, f"has {len(value)} tokens, at most {MAX_BIASES} are taken")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise Refused(name, f"has the key {token!r:.50}, must have token ids")
        number(name, bias, -MAX_BIAS, MAX_BIAS)
    found: Mapping[str, float] = value
    return found


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
