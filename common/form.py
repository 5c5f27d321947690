"""Checks the form of an answer: a choice of texts, a regex, a JSON schema, or a grammar.

A request has at most one. `engine.text.form_child` compiles it, in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from common import fields
from common.errors import InvalidRequest
from common.json_body import read_json

Kind = Literal["choice", "regex", "json_schema", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MAX_CHARACTERS = 64 << 10  # per form; a form of this length compiles within some 50 ms
MAX_CHOICES = 1000


@dataclass(frozen=True)
class Form:
    """The form that an answer must match.

    kind: the request parameter that holds the form: a key of `CHECKS`
    source: the texts of a choice; the text of an expression, a grammar, or a schema in JSON
    """

    kind: Kind
    source: tuple[str, ...]


def choice(name: str, value: Any) -> Form | None:
    """Check the texts that an answer may be, as a list or its JSON text; None for an empty list."""
    if isinstance(value, str):
        value = _read(name, value, "must be a list of texts or its JSON text")
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise fields.wrong(name, "must be a list of texts that are not empty")
    if len(value) > MAX_CHOICES:
        raise fields.wrong(name, f"has {len(value)} texts, at most {MAX_CHOICES} are allowed")
    _check_length(name, sum(map(len, value)))
    return Form("choice", tuple(dict.fromkeys(value))) if value else None


def regex(name: str, value: Any) -> Form:
    return Form("regex", (_text(name, value),))


def grammar(name: str, value: Any) -> Form:
    """Check the text of a grammar in Lark's syntax, or llama.cpp's (GBNF)."""
    return Form("grammar", (_text(name, value),))


def json_schema(name: str, value: Any) -> Form:
    """Check a JSON schema, as an object or as its JSON text; `true` allows any JSON value."""
    if isinstance(value, str):
        value = _read(name, value, "is no JSON, must be a JSON schema")
    if not isinstance(value, Mapping) and value is not True:
        raise fields.wrong(name, f"must be a JSON schema, is {fields.kind(value)}")
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise fields.wrong(name, "is nested too deeply") from None
    return Form("json_schema", (_text(name, text),))


def _read(name: str, text: str, otherwise: str) -> Any:
    try:
        return read_json(text, source=name)
    except InvalidRequest:
        raise fields.wrong(name, otherwise) from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise fields.wrong(name, f"must be text that is not empty, is {fields.kind(value)}")
    _check_length(name, len(value))
    return value


def _check_length(name: str, length: int) -> None:
    if length > MAX_CHARACTERS:
        raise fields.wrong(name, f"has {length} characters, at most {MAX_CHARACTERS} are allowed")


CHECKS: Mapping[str, Callable[[str, Any], Form | None]] = {
    "choice": choice,
    "regex": regex,
    "json_schema": json_schema,
    "grammar": grammar,
}
