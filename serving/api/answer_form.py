"""The form of an answer by the names of OpenAI, vLLM, llama.cpp and TGI, as an engine's parameter.

The engine's own are `choice`, `regex`, `json_schema` and `grammar` (`common.form`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common import fields
from common.errors import EngineError, InvalidRequest
from common.form import CHECKS, KINDS, Kind

ANY_OBJECT = {"type": "object"}
# Of vLLM's `structured_outputs`, by the engine's names.
STRUCTURED: Mapping[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
# There is one backend, and it writes no properties that a schema does not name.
WITHOUT_EFFECT = {
    *("backend", "_backend", "_backend_was_auto", "disable_fallback"),
    "disable_additional_properties",
}


@dataclass(frozen=True)
class GivenForm:
    """The form of an answer as a request gives it.

    field: its name in the request
    kind, value: the engine's parameter
    """

    field: str
    kind: Kind
    value: Any

    @property
    def parameters(self) -> dict[str, Any]:
        return {self.kind: self.value}


def read(given: Mapping[str, Any]) -> GivenForm | None:
    """Returns the form that a request's fields name.

    Raises `InvalidRequest`; with both names where there are two forms.
    """
    form = only([parse(name, given[name]) for name, parse in FIELDS.items() if name in given])
    pattern = given.get(PATTERN)
    return form if pattern is None else _spaced(form, _any_of(PATTERN, pattern))


def only(forms: Sequence[GivenForm | None]) -> GivenForm | None:
    """The one of these that is there. Raises `InvalidRequest` where there are two."""
    named = [form for form in forms if form is not None]
    if len(named) > 1:
        reason = f"and {named[0].field} are given; an answer is held to one form"
        raise fields.wrong(named[1].field, reason)
    return named[0] if named else None


def typed(field: str, value: Any) -> GivenForm | None:
    """Parses a form with a `type`: OpenAI's `response_format` or `text.format`, or TGI's `grammar`.

    Returns None for "text". With "json_object" llama.cpp has a `schema`, and TGI a `value`.
    """
    given = _mapping(field, value)
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            inside = next((name for name in ("schema", "value") if name in given), "")
            schema = given.get(inside, ANY_OBJECT)
            return form_of(field, "json_schema", schema, f"{field}.{inside}")
        case "json_schema":
            path = next((f"{field}.{k}" for k in ("json_schema", "value") if k in given), field)
            if path != field:
                given = _mapping(path, given[path.rpartition(".")[2]])
            return form_of(field, "json_schema", given.get("schema"), f"{path}.schema")
        case "json":
            return form_of(field, "json_schema", given.get("value"), f"{field}.value")
        case "regex":
            return form_of(field, "regex", given.get("value"), f"{field}.value")
    known = "text, json_object, json_schema, or TGI's json or regex"
    raise fields.wrong(f"{field}.type", f"must be {known}")


def structured(field: str, value: Any) -> GivenForm | None:
    """vLLM's `structured_outputs`: one form, and how the answer to a schema is spaced."""
    given = {k: v for k, v in _mapping(field, value).items() if v is not None and v is not False}
    for name in given:
        if name not in (*STRUCTURED, *SPACES, *WITHOUT_EFFECT):
            known = ", ".join((*STRUCTURED, *SPACES))
            raise fields.wrong(f"{field}.{name}", f"is not known here; known are {known}")
    if "json_object" in given:
        fields.boolean(f"{field}.json_object", given["json_object"])
        given["json_object"] = ANY_OBJECT
    form = only(
        [form_of(f"{field}.{k}", kind, given[k]) for k, kind in STRUCTURED.items() if k in given]
    )
    if form is None:
        raise fields.wrong(field, f"must have one of {', '.join(STRUCTURED)}")
    for name, spaces in SPACES.items():
        if name in given:
            form = _spaced(form, spaces(f"{field}.{name}", given[name]))
    return form


def named_by_request(error: EngineError, form: GivenForm | None) -> EngineError:
    """Returns the engine's error about a form with the name of the request's own field."""
    if form is not None and isinstance(error, InvalidRequest):
        kind, _, reason = error.message.partition(": ")
        if kind == f"parameters.{form.kind}":
            return InvalidRequest(f"{form.field}: {reason}", field=form.field)
    return error


def form_of(field: str, kind: Kind, value: Any, path: str = "") -> GivenForm:
    """`path` is where the value itself stands, if that is deeper."""
    CHECKS[kind](path or field, value)
    return GivenForm(field, kind, value)


def _spaced(form: GivenForm | None, spaces: Mapping[str, Any]) -> GivenForm | None:
    """A schema with the spaces that its answer may have. Other forms have theirs in them."""
    if form is None or form.kind != "json_schema":
        return form
    schema = json.loads(form.value) if isinstance(form.value, str) else form.value
    schema = {} if schema is True else schema
    return replace(form, value={**schema, "x-guidance": spaces})


def _any_of(field: str, pattern: Any) -> Mapping[str, Any]:
    CHECKS["regex"](field, pattern)
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}


def _none(field: str, value: Any) -> Mapping[str, Any]:
    fields.boolean(field, value)
    return {"item_separator": ",", "key_separator": ":"}


def _mapping(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise fields.wrong(field, f"must be an object, is {fields.kind(value)}")
    return value


def _named(kind: Kind) -> Callable[[str, Any], GivenForm]:
    return lambda field, value: form_of(field, kind, value)


SPACES: Mapping[str, Callable[[str, Any], Mapping[str, Any]]] = {
    "whitespace_pattern": _any_of,
    "disable_any_whitespace": _none,
}
# Of requests to OpenAI's routes: its own, vLLM's, its older ones, and ours, of which llama.cpp has
# the last two as well.
FIELDS: Mapping[str, Callable[[str, Any], GivenForm | None]] = {
    "response_format": typed,
    "structured_outputs": structured,
    "guided_json": _named("json_schema"),
    "guided_regex": _named("regex"),
    "guided_choice": _named("choice"),
    "guided_grammar": _named("grammar"),
    **{kind: _named(kind) for kind in KINDS},
}
PATTERN = "guided_whitespace_pattern"
