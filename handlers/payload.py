"""Parses the requests of a text model and formats its answers.

{"inputs": text, "parameters": {...}}  ->  {"generated_text", "tokens", "finish_reason",
                                            "seconds"}; inputs are a text, or an object with the
                                            fields of the model's template
"text", a JSON string (the client of   ->  [text, steps, seconds], the prompt in front
    the AWS KoGPT2 guide sends this)
text/plain                             ->  text/plain
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest, UnsupportedMediaType
from common.json_body import MAX_VALUES, read_json, read_text
from common.media_types import JSON, TEXT, accepted, media_type
from common.parameters import Parameters


class BodyKind(enum.Enum):
    """What a body is: an object of fields, the JSON string of KoGPT2's guide, or plain text."""

    OBJECT = enum.auto()
    GUIDE = enum.auto()
    TEXT = enum.auto()


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request; `parameters` is as the client sent it."""

    body_kind: BodyKind
    inputs: str | Mapping[str, str]
    parameters: Mapping[str, Any]
    stream: bool = False


def parse(body: bytes | str, content_type: str | None) -> GenerateRequest:
    """Parse a body. Raises `InvalidRequest` with the field, or `UnsupportedMediaType`."""
    kind, _ = media_type(content_type)
    if kind not in (JSON, TEXT):
        raise UnsupportedMediaType(
            f"Content-Type is {content_type}, must be {JSON} or {TEXT} in UTF-8"
            " (with curl: -H 'Content-Type: application/json')"
        )
    if kind == TEXT:
        return GenerateRequest(BodyKind.TEXT, _checked(read_text(body)), {})
    value = read_json(body, MAX_VALUES)
    if isinstance(value, str):
        # The guide's loop ends at `</s>` only; this answer ends also when the context is full.
        return GenerateRequest(BodyKind.GUIDE, _checked(value), {"max_new_tokens": 1_000_000})
    if not isinstance(value, dict):
        raise InvalidRequest(
            'the body must be {"inputs": text, "parameters": {...}} or a JSON string'
        )
    return from_object(value)


def from_object(value: Mapping[str, Any]) -> GenerateRequest:
    """Check a request that is a JSON object. Raises `InvalidRequest` with the field."""
    for name in value:
        if name not in ("inputs", "parameters", "stream"):
            raise InvalidRequest(f"{name} is not known; known are inputs, parameters, stream")
    if "inputs" not in value:
        raise InvalidRequest("inputs is missing, must be text")
    inputs = value["inputs"]
    if not isinstance(inputs, str | dict):
        raise InvalidRequest("inputs must be a string, or an object of the template's fields")
    parameters = value.get("parameters")
    # Sampling may be the model's default, which only the engine knows: allow its parameters.
    checked = Parameters.parse(parameters, {"do_sample": True})
    if checked.return_full_text and isinstance(inputs, dict):
        raise InvalidRequest("parameters.return_full_text needs inputs to be a string")
    stream = value.get("stream", False)
    if not isinstance(stream, bool):
        raise InvalidRequest("stream must be true or false")
    return GenerateRequest(BodyKind.OBJECT, _checked(inputs), parameters or {}, stream)


def to_json(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8; lone surrogates, which UTF-8 lacks, become escapes."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _checked(inputs: str | dict[str, Any]) -> str | dict[str, Any]:
    texts = {"": inputs} if isinstance(inputs, str) else inputs
    for name, text in texts.items():
        if not isinstance(text, str):
            raise InvalidRequest(f"inputs.{name} must be a string")
    if not any(text.strip() for text in texts.values()):
        raise InvalidRequest("inputs is empty, must be text")
    return inputs


def answer_type(accept: str | None, body_kind: BodyKind) -> str:
    """Choose `application/json` or `text/plain` by Accept. Raises `NotAcceptable`."""
    return accepted(accept, (TEXT, JSON) if body_kind is BodyKind.TEXT else (JSON, TEXT))


def sequences_of(request: GenerateRequest, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the completions of an answer of `engine.http.client.ModelHandle.generate`.

    Each is as the engine describes it, but with `generated_text`, which may begin with the prompt.
    """
    full = request.body_kind is BodyKind.GUIDE or bool(request.parameters.get("return_full_text"))
    prompt = request.inputs if full and isinstance(request.inputs, str) else ""
    return [
        {"generated_text": prompt + c["text"], **{k: v for k, v in c.items() if k != "text"}}
        for c in answer["completions"]
    ]


def format_answer(
    request: GenerateRequest, answer: Mapping[str, Any], kind: str
) -> tuple[bytes, str]:
    """Format the engine's answer as body and content type."""
    sequences = sequences_of(request, answer)
    first = sequences[0]
    if kind == TEXT:
        texts = [sequence["generated_text"] for sequence in sequences]
        return "\n\n".join(texts).encode("utf-8"), f"{TEXT}; charset=utf-8"
    value: Any
    if request.body_kind is BodyKind.GUIDE:
        # The guide's loop does not count `</s>` as a step.
        steps = first["tokens"] - (first["finish_reason"] == "stop")
        value = [first["generated_text"], steps, answer["seconds"]]
    else:
        value = {**first, "seconds": answer["seconds"]}
        if len(sequences) > 1:
            value["sequences"] = sequences
    return to_json(value), JSON
