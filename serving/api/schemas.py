"""The JSON Schemas of bodies, which describe them in OpenAPI and name the fields that are taken.

In schemas.json, `fields` are groups of properties; a schema names the groups that it has in its own
`fields`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.models import model_settings

_CONTENT = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))
GROUPS: dict[str, dict[str, Any]] = _CONTENT["fields"]


def _schemas() -> dict[str, dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = _CONTENT["schemas"]
    for schema in schemas.values():
        for group in schema.pop("fields", ()):
            schema["properties"] |= GROUPS[group]
    schemas["ModelSettings"]["properties"] = model_settings.schema()
    schemas["Load"]["properties"] |= model_settings.schema()
    return schemas


SCHEMAS = _schemas()


def fields_of(name: str) -> frozenset[str]:
    """Return the names of a schema's properties."""
    return frozenset(SCHEMAS[name]["properties"])
