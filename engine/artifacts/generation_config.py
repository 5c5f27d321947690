"""A fine-tune's generation settings: `generation.json`, and transformers' `generation_config.json`.

    {
      "template": "<usr>{text}<unused1>{sentiment}<sys>",
      "defaults": {"sentiment": "0"},
      "parameters": {"max_new_tokens": 40, "stop": ["\\n"]},
      "stop_tokens": ["</s>"],
      "strip": [" "]
    }

All fields are optional. A request's parameters come first, then `generation.json`, then
`generation_config.json`.
"""

from __future__ import annotations

import dataclasses
import logging
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, InvalidRequest
from common.parameters import SAMPLING, Parameters
from engine.artifacts.files import read_json

FILE = "generation.json"
HUGGING_FACE_FILE = "generation_config.json"
# Parameters that only a request may set.
ONLY_IN_REQUESTS = (
    "num_return_sequences", "return_full_text", "logprobs", "seed", "decoder_input_details",
)  # fmt: skip
# Fields of generation_config.json that are parameters here; `SAMPLING` needs do_sample.
LIMITS = (
    "max_new_tokens", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size",
    "bad_words_ids",
)  # fmt: skip
TOP_K = 50  # transformers' default where it samples, which files therefore leave out
MAX_STRIPS = 16
MAX_STRIP_CHARACTERS = 64
# Settings that change transformers' text and are not supported, with values that have no effect.
NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "num_return_sequences"), (1,)),
    **dict.fromkeys(("penalty_alpha", "min_length", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "max_time", "top_h"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers"), ([],)),
    "token_healing": (False,),
    "sequence_bias": ({},),
}
# Further fields of generation_config.json that need no warning: with what is supported here they do
# not change the text. `max_length` is the limit of a request that gives none.
WITHOUT_EFFECT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),  # of beams
    *("renormalize_logits", "remove_invalid_values", "encoder_no_repeat_ngram_size", "max_length"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("return_dict_in_generate", "return_legacy_cache", "output_scores", "output_logits"),
    *("output_attentions", "output_hidden_states", "compile_config", "disable_compile"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "use_mtp"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("assistant_ensemble_weight", "target_lookbehind", "speculation_type"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "continuous_batching_config"),
    *("transformers_version", "_from_model_config", "_commit_hash", "stop_strings"),
    *LIMITS, "do_sample", *SAMPLING,
}  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A piece of a template: text, or the name of a field."""

    text: str
    is_field: bool = False


@dataclass(frozen=True)
class Template:
    """A prompt with fields; `defaults` are the values of fields that a request lacks."""

    parts: tuple[Part, ...]
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> list[str]:
        """The names of the fields in order, without repetitions."""
        return list(dict.fromkeys(part.text for part in self.parts if part.is_field))

    def fill(self, inputs: str | Mapping[str, str]) -> list[Part]:
        """Fill in the fields; a plain text is the value of the first field without a default."""
        open_fields = [name for name in self.fields if name not in self.defaults]
        known = ", ".join(self.fields)
        if isinstance(inputs, str):
            if not open_fields:
                raise InvalidRequest(f"inputs must be an object of fields; known are {known}")
            inputs = {open_fields[0]: inputs}
        for name in inputs:
            if name not in self.fields:
                raise InvalidRequest(f"inputs.{name} is not known; known are {known}")
        values = {**self.defaults, **inputs}
        for name in self.fields:
            if name not in values:
                raise InvalidRequest(f"inputs.{name} is missing, must be text")
        if not any(value.strip() for value in inputs.values()):
            raise InvalidRequest("inputs is empty, must be text")
        return [Part(values[p.text], True) if p.is_field else p for p in self.parts]


@dataclass(frozen=True)
class Generation:
    """The generation settings of an artifact."""

    template: Template | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)  # defaults of a request's
    stop_tokens: tuple[str, ...] = ()  # tokens that end an answer, beside the end token
    strip: tuple[str, ...] = ()  # texts to remove from both ends of an answer
    end_ids: tuple[int, ...] | None = None  # ids of end tokens; None: the tokenizer's

    def over(self, other: Generation) -> Generation:
        """Return these settings, completed with those of `other`."""
        return dataclasses.replace(
            self,
            template=self.template or other.template,
            parameters={**other.parameters, **self.parameters},
            stop_tokens=self.stop_tokens or other.stop_tokens,
            strip=self.strip or other.strip,
            end_ids=other.end_ids,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Generation:
        """The inverse of `to_json`. Raises `KeyError`, `TypeError`."""
        template, end_ids = value["template"], value["end_ids"]
        return cls(
            template
            and Template(tuple(Part(**part) for part in template["parts"]), template["defaults"]),
            dict(value["parameters"]),
            tuple(value["stop_tokens"]),
            tuple(value["strip"]),
            None if end_ids is None else tuple(end_ids),
        )


def read_generation(folder: Path) -> Generation:
    """Read `generation.json`, if it exists. Raises `ArtifactError` that names the field."""
    given = read_json(folder / FILE)
    known = ("template", "defaults", "parameters", "stop_tokens", "strip")
    for name in given:
        if name not in known:
            raise ArtifactError(f"{FILE}: {name} is not known; known are {', '.join(known)}")
    template = _template(given)
    parameters = given.get("parameters") or {}
    for name in ONLY_IN_REQUESTS:
        if isinstance(parameters, dict) and name in parameters:
            raise ArtifactError(f"{FILE}: parameters.{name} can only be in a request")
    try:
        Parameters.parse(parameters)
    except InvalidRequest as error:
        raise ArtifactError(f"{FILE}: {error.message}") from None
    strip = _texts(given, "strip")
    if len(strip) > MAX_STRIPS or any(len(text) > MAX_STRIP_CHARACTERS for text in strip):
        raise ArtifactError(
            f"{FILE}: strip may hold {MAX_STRIPS} texts of {MAX_STRIP_CHARACTERS} characters each"
        )
    return Generation(template, parameters, _texts(given, "stop_tokens"), strip)


def _texts(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = given.get(name, [])
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise ArtifactError(f"{FILE}: {name} must be a list of texts")
    return tuple(value)


def _template(given: Mapping[str, Any]) -> Template | None:
    text, defaults = given.get("template"), given.get("defaults", {})
    if not isinstance(defaults, dict) or not all(isinstance(v, str) for v in defaults.values()):
        raise ArtifactError(f"{FILE}: defaults must be an object of texts, one a field")
    if text is None:
        if defaults:
            raise ArtifactError(f"{FILE}: defaults are of a template's fields; there is none")
        return None
    if not isinstance(text, str):
        raise ArtifactError(f"{FILE}: template must be text")
    parts: list[Part] = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(text):
            if literal:
                parts.append(Part(literal))
            if name is not None:
                if not name.isidentifier() or spec or conversion:
                    raise ValueError(f"{{{name}}} is no field")
                parts.append(Part(name, True))
    except ValueError as error:
        raise ArtifactError(
            f"{FILE}: template: {error}; a field is a name in braces, such as {{text}}, and a"
            " brace itself is written twice"
        ) from None
    template = Template(tuple(parts), defaults)
    if not template.fields:
        raise ArtifactError(f"{FILE}: template has no field, such as {{text}}")
    for name in defaults:
        if name not in template.fields:
            raise ArtifactError(f"{FILE}: defaults.{name} is no field of the template")
    return template


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> Generation:
    """Read the defaults of transformers' `generate`. Raises `ArtifactError`.

    They are in `generation_config.json`, or without that in `config.json`, as older versions wrote
    them. Settings that are not supported and would change the text, such as beams, are ignored with
    a warning in the log; in `generation_config.json` all that are not known.
    """
    path = folder / HUGGING_FACE_FILE
    given, file = read_json(path), path.name
    if not path.exists():
        known = (*NOT_DONE, *WITHOUT_EFFECT)
        given, file = {name: config[name] for name in known if name in config}, "config.json"
    for name, value in given.items():
        if value is not None and name not in WITHOUT_EFFECT and value not in NOT_DONE.get(name, ()):
            logger.warning("%s: %s is not supported and is ignored", file, name[:100])
    names = (*LIMITS, "do_sample", *SAMPLING) if given.get("do_sample") else LIMITS
    parameters = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("do_sample"):
        parameters.setdefault("top_k", TOP_K)
    if given.get("stop_strings"):
        parameters["stop"] = given["stop_strings"]
    try:
        Parameters.parse(None, parameters)
    except InvalidRequest as error:
        raise ArtifactError(f"{file}: {error.message}") from None
    return Generation(parameters=parameters, end_ids=_end_ids(given.get("eos_token_id"), file))


def _end_ids(value: Any, file: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise ArtifactError(f"{file}: eos_token_id is {value!r}, must be an id or a list of ids")
    return tuple(ids)
