"""Checks the generation parameters of a request; errors name the parameter.

The names are those of Hugging Face's text generation APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common import fields as checks
from common import form as forms
from common.errors import InvalidRequest
from common.form import Form

MAX_SEQUENCES = 16
MAX_LOGPROBS = 20
MAX_LABELS = 64  # texts of a choice whose probabilities are computed, in a pass for each
MAX_SEED = 2**63 - 1

# The check of each parameter: called with its name and value, returns the value to use.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": lambda n, v: checks.integer(n, v, 1, 1_000_000),
    "stop": checks.stops,
    "do_sample": checks.boolean,
    "temperature": lambda n, v: checks.number(n, v, 0, 100),
    "top_k": checks.top_k,
    "top_p": lambda n, v: checks.number(n, v, 0, 1, above=True),
    "min_p": lambda n, v: checks.number(n, v, 0, 1),
    "repetition_penalty": lambda n, v: checks.number(n, v, 0, 100, above=True),
    "frequency_penalty": lambda n, v: checks.number(n, v, -2, 2),
    "presence_penalty": lambda n, v: checks.number(n, v, -2, 2),
    "logit_bias": checks.biases,
    "seed": lambda n, v: checks.integer(n, v, 0, MAX_SEED),
    "num_return_sequences": lambda n, v: checks.integer(n, v, 1, MAX_SEQUENCES),
    "logprobs": lambda n, v: checks.integer(n, v, 0, MAX_LOGPROBS),
    "return_full_text": checks.boolean,
    "decoder_input_details": checks.boolean,
    "ignore_eos": checks.boolean,
    "typical_p": lambda n, v: checks.number(n, v, 0, 1, above=True),
    "no_repeat_ngram_size": lambda n, v: checks.integer(n, v, 0, 1_000_000),
    "min_new_tokens": lambda n, v: checks.integer(n, v, 0, 1_000_000),
    "bad_words": checks.bad_words,
    "bad_words_ids": checks.bad_words_ids,
    "dry_multiplier": lambda n, v: checks.number(n, v, 0, 100),
    "dry_base": lambda n, v: checks.number(n, v, 1, 100),
    "dry_allowed_length": lambda n, v: checks.integer(n, v, 0, 1_000_000),
    "dry_penalty_last_n": lambda n, v: checks.integer(n, v, -1, 1_000_000),
    "dry_sequence_breakers": checks.stops,
    **forms.CHECKS,
    "choice_logprobs": checks.boolean,
}
# Names in llama.cpp, Triton and vLLM of parameters that have another name here.
ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "stop_words": "stop",
    "min_tokens": "min_new_tokens",
}
WORDS = ("stop_words", "bad_words")  # Triton's quick starts send these empty, which means none
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "seed"}


@dataclass(frozen=True)
class Parameters:
    """How to continue a prompt. Without `do_sample` (or any of its parameters) decoding is greedy.

    max_new_tokens: at most this many tokens are made (also bounded by the context)
    stop: texts at which the answer ends; they are not part of it
    do_sample: draw from the distribution; implied by temperature, top_k, top_p, min_p,
        typical_p or seed
    temperature: divides the logits; 0 is greedy
    top_k: draw among the k likeliest tokens; 0 and -1 mean all
    top_p: draw among the likeliest tokens that together reach this probability, 0 < p <= 1
    min_p: draw among tokens that have at least this share of the likeliest one's probability
    repetition_penalty: > 0; logits of tokens seen before are divided (positive) or multiplied by
        it (negative), Keskar et al. 2019 (CTRL)
    frequency_penalty: from -2 to 2; subtracted from a token's logit per occurrence in the answer
    presence_penalty: from -2 to 2; subtracted from the logits of tokens that occur in the answer
    logit_bias: pairs of a token id and the number, from -100 to 100, that is added to its logit
    seed: the same seed gives the same text
    num_return_sequences: answers to one prompt; the i-th is drawn with seed + i
    logprobs: also return this many likeliest tokens per step with their log-probabilities
    return_full_text: also return the prompt, in front of the answer
    decoder_input_details: also return the prompt's tokens, with their log-probabilities if
        `logprobs` is given
    ignore_eos: end tokens do not end the answer
    form: what the answer must match, from one of choice, regex, json_schema and grammar
    choice_logprobs: also return the log-probability of each text of the choice, relative to the
        others; the answer is then the likeliest text as a whole, or drawn by these probabilities
    typical_p: draw among the tokens whose surprisal is nearest to the entropy, as many as together
        reach this probability, Meister et al. 2022; 1 is off
    no_repeat_ngram_size: no n tokens in sequence occur twice in prompt and answer; 0 is off
    min_new_tokens: no end token and no stop text ends the answer before it has this many tokens
    bad_words: texts that never occur in the answer, whatever tokens they consist of
    bad_words_ids: sequences of token ids that never occur in the answer
    dry_multiplier: factor of DRY's penalty, see `engine.rules.Dry`; 0 is off
    dry_base: base of DRY's penalty, whose exponent grows with the length of a repetition
    dry_allowed_length: repetitions of fewer tokens are not penalized
    dry_penalty_last_n: how many of the last tokens DRY searches for repetitions; -1 means all
    dry_sequence_breakers: texts at which a repetition ends
    """

    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_return_sequences: int = 1
    logprobs: int | None = None
    return_full_text: bool = False
    decoder_input_details: bool = False
    ignore_eos: bool = False
    form: Form | None = None
    choice_logprobs: bool = False
    typical_p: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")

    @classmethod
    def parse(cls, given: Any, defaults: Mapping[str, Any] | None = None) -> Parameters:
        """Checks a request's `parameters` object. Raises `InvalidRequest` naming the field.

        `defaults` are the model's own parameters, which have been checked before.
        """
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"parameters must be a JSON object, is {checks.kind(given)}")
        values = _checked(given, "parameters.")
        least, most = values.get("min_new_tokens", 0), values.get("max_new_tokens")
        if most is not None and least > most:
            raise InvalidRequest(
                f"parameters.min_new_tokens is {least}, must be at most max_new_tokens, {most}"
            )
        if SAMPLING & values.keys():
            values.setdefault("do_sample", True)
        values = {**_checked(defaults or {}), **values}
        if values.get("temperature") == 0:
            del values["temperature"]
            values["do_sample"] = False
        values.setdefault("do_sample", bool(SAMPLING & values.keys()))
        if values.get("num_return_sequences", 1) > 1 and not values["do_sample"]:
            raise InvalidRequest(
                "parameters.num_return_sequences above 1 needs parameters.do_sample true:"
                " greedy answers would all be the same"
            )
        return cls(**values)

    def check_choice_logprobs(self) -> None:
        """Raise `InvalidRequest` where `choice_logprobs` does not fit the other parameters."""
        name = "parameters.choice_logprobs"
        if self.form is None or self.form.kind != "choice":
            raise InvalidRequest(f"{name} needs parameters.choice, the texts that it is about")
        if (count := len(self.form.source)) > MAX_LABELS:
            raise InvalidRequest(f"{name} is for at most {MAX_LABELS} texts; choice has {count}")
        if self.num_return_sequences > 1 or self.decoder_input_details:
            other = (
                "num_return_sequences" if self.num_return_sequences > 1 else "decoder_input_details"
            )
            raise InvalidRequest(f"{name} cannot be combined with parameters.{other}")


def _checked(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Check parameters, replace `ALIASES`, and drop null values. Raises `InvalidRequest`."""
    values: dict[str, Any] = {}
    form = ""
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own not in CHECKS and name not in WORDS:
            known = ", ".join(sorted(CHECKS))
            raise InvalidRequest(f"{prefix}{name} is not known; known are {known}")
        if value is None or (name in WORDS and value in ("", [])):
            continue
        checked = CHECKS[own](f"{prefix}{name}", value)
        if own in forms.CHECKS:
            if checked is None:  # an empty choice
                values.setdefault("form", None)
                continue
            if form:
                raise InvalidRequest(
                    f"{prefix}{form} and {prefix}{name} are given; an answer is held to one of"
                    f" {', '.join(forms.CHECKS)}"
                )
            form, own = name, "form"
        elif own in values and values[own] != checked:
            names = sorted((n for n in given if ALIASES.get(n, n) == own), key=own.__eq__)
            raise InvalidRequest(
                f"{' and '.join(prefix + n for n in names)} are two names of one parameter, but"
                " differ; send one of them"
            )
        values[own] = checked
    return values
