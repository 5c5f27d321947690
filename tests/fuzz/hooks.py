"""Names of models in the store for schemathesis, as SCHEMATHESIS_HOOKS=tests.fuzz.hooks."""

from __future__ import annotations

from typing import Any

import schemathesis

KNOWN = {"enum": ["a", "시", "texts", "script"]}
FIELDS = {"model": KNOWN, "url": KNOWN, "model_name": {"enum": ["x1", "x2", "x3"]}}
PARAMETERS = ("name", "X-Amzn-SageMaker-Target-Model")


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Names models that are there, without which no other field is read, and new ones for
    loads."""
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
