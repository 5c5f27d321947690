"""Checks the generation parameters of a request; errors name the parameter.

The names are those of Hugging Face's text generation APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from common import fields as checks
from common import form as forms
from common.errors import InvalidRequest
from common.form import Form

MAX_SEQUENCES = 16
MAX_LOGPROBS = 20
MAX_LABELS = 64  # texts of a choice whose probabilities are computed, in a pass for each
MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 64

# Names in llama.cpp, Triton and vLLM of parameters that have another name here.
ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "stop_words": "stop",
    "min_tokens": "min_new_tokens",
}
WORDS = ("stop_words", "bad_words")  # Triton's quick starts send these empty, which means none
# What a token is drawn from. These, and a seed, imply `do_sample`.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
DRAWS = {*SAMPLING, "seed"}


def _parameter(default: Any, check: Callable[..., Any], *bounds: Any, **options: Any) -> Any:
    """Define a parameter by its default and its check, called with name, value and `bounds`."""
    return field(
        default=default,
        metadata={"check": lambda name, value: check(name, value, *bounds, **options)},
    )


@dataclass(frozen=True)
class Parameters:
    """How to continue a prompt: greedily without `do_sample` or a parameter that implies it."""

    # At most this many tokens are made; also bounded by the context.
    max_new_tokens: int = _parameter(64, checks.integer, 1, 1_000_000)
    # Texts at which the answer ends; they are not part of it.
    stop: tuple[str, ...] = _parameter((), checks.stops)
    # Draw from the distribution; implied by the parameters in `DRAWS`.
    do_sample: bool = _parameter(False, checks.boolean)
    # Divides the logits; 0 is greedy.
    temperature: float = _parameter(1.0, checks.number, 0, 100)
    # Draw among the k likeliest tokens; 0 and -1 mean all.
    top_k: int = _parameter(0, checks.top_k)
    # Draw among the likeliest tokens that together reach this probability.
    top_p: float = _parameter(1.0, checks.number, 0, 1, above=True)
    # Draw among tokens that have at least this share of the likeliest one's probability.
    min_p: float = _parameter(0.0, checks.number, 0, 1)
    # Logits of tokens seen before are divided (positive) or multiplied (negative) by it, Keskar
    # et al. 2019 (CTRL).
    repetition_penalty: float = _parameter(1.0, checks.number, 0, 100, above=True)
    # Subtracted from a token's logit per occurrence in the answer.
    frequency_penalty: float = _parameter(0.0, checks.number, -2, 2)
    # Subtracted from the logits of tokens that occur in the answer.
    presence_penalty: float = _parameter(0.0, checks.number, -2, 2)
    # Pairs of a token id and the number, from -100 to 100, that is added to its logit.
    logit_bias: tuple[tuple[int, float], ...] = _parameter((), checks.biases)
    # The same seed gives the same text.
    seed: int | None = _parameter(None, checks.integer, 0, MAX_SEED)
    # Answers to one prompt; the i-th is drawn with seed + i.
    num_return_sequences: int = _parameter(1, checks.integer, 1, MAX_SEQUENCES)
    # Also return this many likeliest tokens per step with their log-probabilities.
    logprobs: int | None = _parameter(None, checks.integer, 0, MAX_LOGPROBS)
    # Also return the prompt, in front of the answer.
    return_full_text: bool = _parameter(False, checks.boolean)
    # Also return the prompt's tokens, with their log-probabilities if `logprobs` is given.
    decoder_input_details: bool = _parameter(False, checks.boolean)
    # End tokens do not end the answer.
    ignore_eos: bool = _parameter(False, checks.boolean)
    # What the answer must match, from one of choice, regex, json_schema and grammar.
    form: Form | None = None
    # Also return the log-probability of each text of the choice, relative to the others; the
    # answer is then the likeliest text as a whole, or drawn by these probabilities.
    choice_logprobs: bool = _parameter(False, checks.boolean)
    # Draw among the tokens whose surprisal is nearest to the entropy, as many as together reach
    # this probability, Meister et al. 2022; 1 is off.
    typical_p: float = _parameter(1.0, checks.number, 0, 1, above=True)
    # No n tokens in sequence occur twice in prompt and answer; 0 is off.
    no_repeat_ngram_size: int = _parameter(0, checks.integer, 0, 1_000_000)
    # No end token and no stop text ends the answer before it has this many tokens.
    min_new_tokens: int = _parameter(0, checks.integer, 0, 1_000_000)
    # Texts that never occur in the answer, whatever tokens they consist of.
    bad_words: tuple[str, ...] = _parameter(
        (), checks.texts, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS
    )
    # Sequences of token ids that never occur in the answer.
    bad_words_ids: tuple[tuple[int, ...], ...] = _parameter((), checks.bad_words_ids)
    # Factor of DRY's penalty, see `engine.rules.Dry`; 0 is off.
    dry_multiplier: float = _parameter(0.0, checks.number, 0, 100)
    # Base of DRY's penalty, whose exponent grows with the length of a repetition.
    dry_base: float = _parameter(1.75, checks.number, 1, 100)
    # Repetitions of fewer tokens are not penalized.
    dry_allowed_length: int = _parameter(2, checks.integer, 0, 1_000_000)
    # How many of the last tokens DRY searches for repetitions; -1 means all.
    dry_penalty_last_n: int = _parameter(-1, checks.integer, -1, 1_000_000)
    # Texts at which a repetition ends.
    dry_sequence_breakers: tuple[str, ...] = _parameter(("\n", ":", '"', "*"), checks.stops)

    @classmethod
    def parse(cls, given: Any, defaults: Mapping[str, Any] | None = None) -> Parameters:
        """Check a request's `parameters` object. Raises `InvalidRequest` naming the field.

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
        if DRAWS & values.keys():
            values.setdefault("do_sample", True)
        values = {**_checked(defaults or {}), **values}
        if values.get("temperature") == 0:
            del values["temperature"]
            values["do_sample"] = False
        values.setdefault("do_sample", bool(DRAWS & values.keys()))
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


# The check of each parameter: called with its name and value, returns the value to use.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **{f.name: f.metadata["check"] for f in fields_of(Parameters) if f.metadata},
    **forms.CHECKS,
}


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
