"""Forms of answers: the fields of OpenAI, vLLM, llama.cpp and TGI as parameters of the engine.

The engine's own parameters are `choice`, `regex`, `json_schema` and `grammar` (`common.form`).
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
# The engine's parameter for each form in vLLM's `structured_outputs`.
STRUCTURED: Mapping[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
# Accepted without effect: there is one backend, and it adds no properties to those of a schema.
WITHOUT_EFFECT = {
    *("backend", "_backend", "_backend_was_auto", "disable_fallback"),
    "disable_additional_properties",
}


@dataclass(frozen=True)
class GivenForm:
    """The form of an answer as a request gives it.

    field: the request's field that holds it
    kind, value: name and value of the engine's parameter
    """

    field: str
    kind: Kind
    value: Any

    @property
    def parameters(self) -> dict[str, Any]:
        return {self.kind: self.value}


def read(given: Mapping[str, Any]) -> GivenForm | None:
    """Return the form in a request's fields, None without one.

    Raises `InvalidRequest`, which names both fields if there are two forms.
    """
    form = only([parse(name, given[name]) for name, parse in FIELDS.items() if name in given])
    pattern = given.get(PATTERN)
    return form if pattern is None else _spaced(form, _any_of(PATTERN, pattern))


def only(forms: Sequence[GivenForm | None]) -> GivenForm | None:
    """Return the only form that is not None, or None. Raises `InvalidRequest` for two forms."""
    named = [form for form in forms if form is not None]
    if len(named) > 1:
        reason = f"and {named[0].field} are given; an answer is held to one form"
        raise fields.wrong(named[1].field, reason)
    return named[0] if named else None


def typed(field: str, value: Any) -> GivenForm | None:
    """Parse a form with a `type`: OpenAI's `response_format` or `text.format`, or TGI's `grammar`.

    Returns None for "text". A "json_object" may have a schema: in llama.cpp's field `schema`, or in
    TGI's `value`.
    """
    given = fields.mapping(field, value)
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
                given = fields.mapping(path, given[path.rpartition(".")[2]])
            return form_of(field, "json_schema", given.get("schema"), f"{path}.schema")
        case "json":
            return form_of(field, "json_schema", given.get("value"), f"{field}.value")
        case "regex":
            return form_of(field, "regex", given.get("value"), f"{field}.value")
    known = "text, json_object, json_schema, or TGI's json or regex"
    raise fields.wrong(f"{field}.type", f"must be {known}")


def structured(field: str, value: Any) -> GivenForm | None:
    """Parse vLLM's `structured_outputs`: one form, and the whitespace of a JSON answer."""
    options = fields.mapping(field, value)
    given = {k: v for k, v in options.items() if v is not None and v is not False}
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
    """Return the engine's error; if it is about `form`, with the name of the request's field."""
    if form is not None and isinstance(error, InvalidRequest):
        kind, _, reason = error.message.partition(": ")
        if kind == f"parameters.{form.kind}":
            return InvalidRequest(f"{form.field}: {reason}", field=form.field)
    return error


def form_of(field: str, kind: Kind, value: Any, path: str = "") -> GivenForm:
    """Check the form in `field` and return it. Errors name `path` if the value is nested deeper."""
    CHECKS[kind](path or field, value)
    return GivenForm(field, kind, value)


def _spaced(form: GivenForm | None, spaces: Mapping[str, Any]) -> GivenForm | None:
    """Add whitespace options to a JSON schema. Other forms define their whitespace themselves."""
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


def _named(kind: Kind) -> Callable[[str, Any], GivenForm]:
    return lambda field, value: form_of(field, kind, value)


SPACES: Mapping[str, Callable[[str, Any], Mapping[str, Any]]] = {
    "whitespace_pattern": _any_of,
    "disable_any_whitespace": _none,
}
# Parsers of the fields in requests to OpenAI's routes: OpenAI's field, vLLM's, vLLM's older ones,
# and the engine's own, of which llama.cpp has `json_schema` and `grammar`, too.
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
