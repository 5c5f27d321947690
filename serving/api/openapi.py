"""The OpenAPI 3.1 document of both ports, and a page that shows it without any outside host."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from common.media_types import JSON
from serving.api.access import Right
from serving.api.naming import SESSION_ID
from serving.api.routing import Route
from serving.api.schemas import SCHEMAS

DESCRIPTION = (
    "Serves many fine-tunes of KoGPT2 at once. The port for requests answers every route, the"
    " management port those under `management` and `health`."
)
HEADERS = {
    "X-Amzn-SageMaker-Target-Model": "which model, as a path below the store: `poem.tar.gz`",
}  # of the routes with `invocations` in their path
SESSION = {SESSION_ID: "requests with the same one get the same model of an alias"}
# Routes of a loaded model: path, method.
LINKS = {"call": ("/predictions/{name}", "post"), "unload": ("/models/{name}", "delete")}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of a port's routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.kind.tag:
            _, path, _ = route.compiled
            for method in route.methods.lower().split():
                paths.setdefault(path, {})[method] = _operation(route, path)
    paths["/models"]["post"]["responses"]["200"]["links"] = {
        name: {
            "operationRef": f"#/paths/{path.replace('/', '~1')}/{method}",
            "parameters": {"name": "$request.body#/model_name"},
        }
        for name, (path, method) in LINKS.items()
        if path in paths
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "KoGPT2 serving", "version": "0.1.0", "description": DESCRIPTION},
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    kind = route.kind
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    for name, _, of in (field.partition("=") for field in route.query.split("&") if field):
        parameters.append({"name": name, "in": "query", "schema": {"type": of}})
    headers = HEADERS if "invocations" in path else {}
    if kind.right is Right.CALL and kind.sent:
        headers = headers | SESSION
    for name, description in headers.items():
        described = {"name": name, "in": "header", "description": description}
        parameters.append({**described, "schema": {"type": "string"}})
    refused = {"description": "the message says why", "content": _content({JSON: kind.error})}
    done: dict[str, Any] = {"description": "done"}
    if kind.answered:
        done["content"] = _content(kind.answered)
    operation = {
        "tags": [kind.tag],
        "summary": route.summary,
        "parameters": parameters,
        "responses": {"200": done, **dict.fromkeys(route.errors.split(), refused)},
    }
    return operation | ({"requestBody": {"content": _content(kind.sent)}} if kind.sent else {})


def _content(kinds: Mapping[str, Any]) -> dict[str, Any]:
    def schema(named: Any) -> dict[str, Any]:
        if isinstance(named, tuple):
            return {"anyOf": [schema(one) for one in named]}
        return {"$ref": f"#/components/schemas/{named}"}

    return {kind: {"schema": schema(named)} for kind, named in kinds.items()}


def of_model(described: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a document with a single route, the one that calls a model."""
    operation = described["paths"]["/predictions/{name}"]["post"]
    path = "/predictions/" + quote(name, safe="")
    return {**described, "paths": {path: {"post": {**operation, "parameters": []}}}}


def page(described: dict[str, Any]) -> str:
    """Return a document as a self-contained HTML page."""
    rows = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            statuses = ", ".join(operation["responses"])
            rows.append(
                f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td>"
                f"<td>{html.escape(operation['summary'])}</td><td>{statuses}</td></tr>"
            )
    schemas = html.escape(json.dumps(described["components"]["schemas"], indent=2))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>KoGPT2 serving</title>"
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td{padding:.3em 1em .3em 0;vertical-align:top}pre{background:#f4f4f4;padding:1em}</style>"
        f"<h1>KoGPT2 serving</h1><p>{html.escape(described['info']['description'])}</p>"
        f"<table>{''.join(rows)}</table><h2>Schemas</h2><pre>{schemas}</pre>"
        "<p><a href='/openapi.json'>openapi.json</a></p></html>"
    )
