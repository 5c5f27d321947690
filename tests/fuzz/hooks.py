"""Schemathesis sends names of models in the store, and a text request's fields to one route.
Used as SCHEMATHESIS_HOOKS=tests.fuzz.hooks."""

from __future__ import annotations

from typing import Any

import schemathesis

KNOWN = {"enum": ["a", "시", "texts", "script"]}
FIELDS = {"model": KNOWN, "url": KNOWN, "model_name": {"enum": ["x1", "x2", "x3"]}}
PARAMETERS = ("name", "X-Amzn-SageMaker-Target-Model")
# One of nine routes with the same parser; on the others, 15,000 requests would differ in one field.
WHOLE = "/models/{name}/invoke"


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Names models that are there, without which no other field is read, and new ones for loads. A
    body of several forms has all their fields at `WHOLE` only, else the required and `stream`."""
    forms = raw_schema["components"]["schemas"]
    for form in forms.values():
        fields = form.get("properties", {})
        if "stream_options" in fields:  # without a stream they are refused before the others
            fields["stream"]["default"] = True
        fields.update((name, kind) for name, kind in FIELDS.items() if name in fields)
    for path, methods in raw_schema["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in PARAMETERS:
                    parameter["schema"] = KNOWN
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if path != WHOLE and (among := content["schema"].get("anyOf")):
                    short = [few_fields(forms[form["$ref"].rpartition("/")[2]]) for form in among]
                    content["schema"] = {"anyOf": short}


def few_fields(schema: dict[str, Any]) -> dict[str, Any]:
    kept = {*schema.get("required", ()), "stream"}
    fields = {name: kind for name, kind in schema.get("properties", {}).items() if name in kept}
    return schema | ({"properties": fields} if fields else {})
