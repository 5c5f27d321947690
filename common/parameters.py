"""The generation parameters of a request: what they may be, and errors that name them.

Names are those of Hugging Face's text generation APIs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from common.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_SEQUENCES = 16
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_BIASES = 1024
MAX_BIAS = 100


@dataclass(frozen=True)
class Parameters:
    """How to continue a prompt. Without `do_sample` (or any of its parameters) decoding is greedy.

    max_new_tokens: at most this many tokens are made (also bounded by the context)
    stop: texts at which the answer ends; they are not part of it
    do_sample: draw from the distribution; implied by temperature, top_k, top_p or seed
    temperature: > 0; divides the logits
    top_k: draw among the k likeliest tokens; 0 means all
    top_p: draw among the likeliest tokens that together reach this probability, 0 < p <= 1
    repetition_penalty: > 0; logits of tokens seen before are divided (positive) or multiplied by
        it (negative), Keskar et al. 2019 (CTRL)
    frequency_penalty: from -2 to 2; taken from a token's logit as often as it stands in the answer
    presence_penalty: from -2 to 2; taken from a token's logit once it stands in the answer
    logit_bias: token ids and what is added to their logits, from -100 to 100
    seed: same seed, same text
    num_return_sequences: answers to one prompt; the i-th is drawn with seed + i
    logprobs: also return this many likeliest tokens per step with their log-probabilities
    return_full_text: the prompt comes back in front of the answer
    decoder_input_details: the prompt's tokens come back, too, with their log-probabilities where
        `logprobs` is given
    """

    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_return_sequences: int = 1
    logprobs: int | None = None
    return_full_text: bool = False
    decoder_input_details: bool = False

    @classmethod
    def parse(cls, given: Any, defaults: Mapping[str, Any] | None = None) -> Parameters:
        """Checks a request's `parameters` object. Raises `InvalidRequest` naming the field.

        `defaults`, checked already, are a model's own.
        """
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"parameters must be a JSON object, is {_kind(given)}")
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidRequest(
                    f"parameters.{name} is not known; known are {', '.join(sorted(known))}"
                )
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        integer, number = _integer, _number
        checks = {
            "max_new_tokens": lambda n, v: integer(n, v, 1, 1_000_000),
            "stop": _stop,
            "do_sample": _boolean,
            "temperature": lambda n, v: number(n, v, 0, 100),
            "top_k": lambda n, v: integer(n, v, 0, 1_000_000),
            "top_p": lambda n, v: number(n, v, 0, 1),
            "repetition_penalty": lambda n, v: number(n, v, 0, 100),
            "frequency_penalty": lambda n, v: _between(n, v, -2, 2),
            "presence_penalty": lambda n, v: _between(n, v, -2, 2),
            "logit_bias": _biases,
            "seed": lambda n, v: integer(n, v, 0, MAX_SEED),
            "num_return_sequences": lambda n, v: integer(n, v, 1, MAX_SEQUENCES),
            "logprobs": lambda n, v: integer(n, v, 0, MAX_LOGPROBS),
            "return_full_text": _boolean,
            "decoder_input_details": _boolean,
        }
        values = {name: checks[name](f"parameters.{name}", v) for name, v in values.items()}
        sampling = ("temperature", "top_k", "top_p", "seed")
        implied = any(name in values for name in sampling)
        if defaults:
            if implied:
                values.setdefault("do_sample", True)
            model_values = {name: checks[name](name, value) for name, value in defaults.items()}
            values = {**model_values, **values}
            implied = any(name in values for name in sampling)
        values.setdefault("do_sample", implied)
        if values.get("num_return_sequences", 1) > 1 and not values["do_sample"]:
            raise InvalidRequest(
                "parameters.num_return_sequences above 1 needs parameters.do_sample true:"
                " greedy answers would all be the same"
            )
        return cls(**values)


def _kind(value: Any) -> str:
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


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, is {_kind(value)}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, is {value}")
    return value


def _number(name: str, value: Any, above: float, high: float) -> float:
    _check_number(name, value)
    if not above < value <= high or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be above {above} and at most {high}, is {value}")
    return float(value)


def _between(name: str, value: Any, low: float, high: float) -> float:
    _check_number(name, value)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, is {value}")
    return float(value)


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number, is {_kind(value)}")


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object of token ids, is {_kind(value)}")
    if len(value) > MAX_BIASES:
        raise InvalidRequest(f"{name} has {len(value)} tokens, at most {MAX_BIASES} are allowed")
    for token in value:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise InvalidRequest(f"{name} has the key {token!r:.50}, must have token ids")
    return tuple(
        (int(token), _between(f"{name}.{token}", bias, -MAX_BIAS, MAX_BIAS))
        for token, bias in value.items()
    )


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, is {_kind(value)}")
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequest(f"{name} must be a string or a list of strings, is {_kind(value)}")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{name} has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"{name} strings must have 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)
