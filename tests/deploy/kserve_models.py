"""Checks objects of KServe's API on standard input against KServe's and Kubernetes' Python models.

Run by the Python of requirements/clients.txt; writes the errors of each as JSON."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import kserve.models
import kubernetes.client

SCALARS: Any = {"str": str, "int": int, "bool": bool, "object": object, "IntOrString": (int, str)}


def errors(value: Any, kind: str, path: str) -> list[str]:
    if listed := re.fullmatch(r"[lL]ist\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{path}: a list is wanted"]
        parts = (errors(item, listed[1], f"{path}[{i}]") for i, item in enumerate(value))
        return [error for part in parts for error in part]
    if mapped := re.fullmatch(r"[dD]ict[(\[]str, (.*)[)\]]", kind):
        if not isinstance(value, dict):
            return [f"{path}: a map is wanted"]
        parts = (errors(item, mapped[1], f"{path}.{name}") for name, item in value.items())
        return [error for part in parts for error in part]
    model = getattr(kserve.models, kind, None) or getattr(kubernetes.client, kind, None)
    if model is None:
        wanted = SCALARS.get(kind, str)  # quantities and the like are written as texts
        wrong = not isinstance(value, wanted) or (kind == "int" and isinstance(value, bool))
        return [f"{path}: {kind} is wanted"] if wrong else []
    if not isinstance(value, dict):
        return [f"{path}: {kind} is wanted"]
    fields = {name: field for field, name in model.attribute_map.items()}
    found = []
    for name, part in value.items():
        if name not in fields:
            found.append(f"{path}.{name}: unknown")
        else:
            found += errors(part, model.openapi_types[fields[name]], f"{path}.{name}")
    try:
        model(**{fields[name]: part for name, part in value.items() if name in fields})
    except ValueError as error:  # a field is missing, or none of its values
        found.append(f"{path}: {error}")
    return found


def model_name(document: dict[str, Any]) -> str:
    version = document["apiVersion"].rpartition("/")[2]
    return f"{version[:1].upper()}{version[1:]}{document['kind']}"


if __name__ == "__main__":
    documents = json.load(sys.stdin)
    print(json.dumps([errors(d, model_name(d), d["kind"]) for d in documents]))
