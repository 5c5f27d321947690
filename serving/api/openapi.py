"""The OpenAPI 3.1 document of both ports, and a page that shows it without any outside host.

What bodies hold is in schemas.json.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.media_types import JSON, TEXT
from serving.api.sessions import SESSION_ID
from serving.models import model_settings

SCHEMAS = Path(__file__).with_name("schemas.json")
EVENTS, LINES, BYTES = "text/event-stream", "application/x-ndjson", "application/octet-stream"
DESCRIPTION = (
    "Serves many fine-tunes of KoGPT2 at once. The port for requests answers every route, the"
    " management port those under `management` and `health`."
)
PROMPTS = ("Generate", "OpenAICompletion", "OpenAIChat", "Text")
# A model's own code answers what it likes.
ANSWERS = {
    JSON: ("Generated", "Guide", "Any"),
    TEXT: "Text",
    EVENTS: "Any",
    LINES: "Any",
    "*/*": "Any",
}
# A stream has no schema: what reads the document looks at each of its events.
# What the routes share: whose errors they answer, what is sent, what is answered.
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "health": ("Error", {}, {}),
    "management": ("Error", {}, {}),
    "load": ("Error", {JSON: "Load"}, {}),
    "adapter": ("Error", {JSON: "Adapter"}, {TEXT: "Text"}),
    "inference": (("Error", "OpenAIError"), {JSON: PROMPTS, TEXT: "Text"}, ANSWERS),
    "invocation": (
        ("Error", "OpenAIError"),
        {JSON: (*PROMPTS, "Session"), TEXT: "Text"},
        ANSWERS,
    ),
    "description": ("Error", {}, {}),
    "endpoint": (
        "AWSError",
        {JSON: (*PROMPTS, "Session"), TEXT: "Text"},
        {"*/*": "Any"},
    ),
    "OpenAI": ("OpenAIError", {}, {}),
    "completion": ("OpenAIError", {JSON: "OpenAICompletion"}, {JSON: "Any", EVENTS: "Any"}),
    "chat": ("OpenAIError", {JSON: "OpenAIChat"}, {JSON: "Any", EVENTS: "Any"}),
    "response": ("OpenAIError", {JSON: "OpenAIResponse"}, {JSON: "Any", EVENTS: "Any"}),
    "tokens": ("OpenAIError", {JSON: "Any"}, {JSON: "Any"}),
    "V2": ("V2Error", {}, {}),
    "infer": ("V2Error", {JSON: "Infer", BYTES: "Bytes"}, {JSON: "Inferred", BYTES: "Bytes"}),
    "generate": ("V2Error", {JSON: "V2Generate"}, {JSON: "Any", EVENTS: "Any"}),
}
TAGS = {
    "load": "management", "adapter": "management",
    "description": "inference", "invocation": "inference", "endpoint": "inference",
    "completion": "OpenAI", "chat": "OpenAI", "response": "OpenAI", "tokens": "OpenAI",
    "infer": "V2", "generate": "V2",
}  # fmt: skip
CALL = "400 401 403 404 405 406 408 413 415 429 500 503 504 507"
# Method, path with its query, kind, errors, summary.
ROUTES = f"""
GET /ping | health | 503 | 200 when a request would work
GET /health | health | 503 | The same, as vLLM and TGI have it
GET /metrics | health | | Prometheus metrics
POST /models | load | 400 401 403 404 408 409 413 415 429 500 503 504 507 | Load a model
GET /models?limit=integer&next_page_token=string&available=boolean | management | \
400 401 403 429 503 | List the loaded models; with `available=true` what the store offers
GET /models/{{name}} | management | 401 403 404 429 | Describe a model
PUT /models/{{name}}?min_worker=integer&max_worker=integer&pinned=boolean | management | \
400 401 403 404 429 503 | Change how many requests are passed on to a model at once, or pin it
DELETE /models/{{name}} | management | 401 403 404 429 503 | \
Unload a model; answers once its memory is free
POST /adapters | adapter | 400 401 403 404 408 409 413 415 429 500 503 504 507 | \
Load an adapter beside the one model (SageMaker's adapter inference components)
DELETE /adapters/{{name}} | management | 401 403 404 429 503 | Unload it
POST /models/{{name}}/invoke | inference | {CALL} | Continue a prompt (SageMaker multi-model)
POST /predictions/{{name}} | inference | {CALL} | Continue a prompt (Multi Model Server)
GET /predictions/{{name}} | inference | {CALL} | The same
PUT /predictions/{{name}} | inference | {CALL} | The same
OPTIONS /predictions/{{name}} | description | 401 403 404 429 | This, of one model
POST /{{name}}/predict | inference | {CALL} | Continue a prompt (Multi Model Server's legacy route)
POST /invocations | invocation | {CALL} | Continue a prompt, or open or close a session (SageMaker)
POST /endpoints/{{endpoint}}/invocations | endpoint | 400 424 500 | \
Continue a prompt, as SageMaker's runtime answers (boto3)
POST /endpoints/{{endpoint}}/invocations-response-stream | endpoint | 400 424 500 | \
The same, in AWS's event stream
GET /v1/models | OpenAI | 401 403 429 503 | List the models of the store
GET /v1/models/{{name}} | OpenAI | 401 403 404 429 503 | Whether there is such a model
POST /v1/completions | completion | {CALL} | Continue texts or token ids
POST /v1/chat/completions | chat | {CALL} | Answer a chat
POST /v1/responses | response | {CALL} | The same, as the Responses API has it
POST /generate | inference | {CALL} | Continue a text, as Hugging Face's TGI does
POST /generate_stream | inference | {CALL} | The same, in server-sent events
POST /tokenize | tokens | {CALL} | A text or a chat as token ids, as vLLM has it
POST /detokenize | tokens | {CALL} | Token ids as text
GET /v2 | V2 | | The server's name and extensions
GET /v2/health/live | V2 | | 200 as long as the server answers
GET /v2/health/ready | V2 | 503 | As /ping
GET /v2/models/{{name}} | V2 | {CALL} | The model's inputs and outputs
GET /v2/models/{{name}}/ready | V2 | 400 401 403 404 429 503 | 200 when the model is loaded
POST /v2/models/{{name}}/infer | infer | {CALL} | Tensors in, tensors out
GET /v2/models/{{name}}/config | V2 | {CALL} | As Triton describes it
GET /v2/models/{{name}}/stats | V2 | 401 403 404 429 503 | What is counted of it
GET /v2/models/stats | V2 | 401 403 429 503 | The same of all that are loaded
POST /v2/models/{{name}}/generate | generate | {CALL} | Continue a text
POST /v2/models/{{name}}/generate_stream | generate | {CALL} | The same, in server-sent events
POST /v2/repository/index | V2 | 400 401 403 408 413 429 503 | The store's models and their states
POST /v2/repository/models/{{name}}/load | V2 | {CALL} | To load a model
POST /v2/repository/models/{{name}}/unload | V2 | {CALL} | To unload a model
"""
HEADERS = {
    "X-Amzn-SageMaker-Target-Model": "which model, as a path below the store: `poem.tar.gz`",
    SESSION_ID: "which session, where `SAGEMAKER_ENABLE_STATEFUL_SESSIONS` is true",
}  # of the routes with `invocations` in their path
MANAGING = {"management", "health"}  # what the management port answers
# Routes of a loaded model: path, method.
LINKS = {"call": ("/predictions/{name}", "post"), "unload": ("/models/{name}", "delete")}


def document(*, managing: bool = False) -> dict[str, Any]:
    """Of the port for requests, or of a management port of its own."""
    paths: dict[str, dict[str, Any]] = {}
    for line in ROUTES.strip().splitlines():
        route, kind, errors, summary = (part.strip() for part in line.split("|"))
        if managing and TAGS.get(kind, kind) not in MANAGING:
            continue
        method, path = route.split(" ")
        path, _, query = path.partition("?")
        versions = path.replace("models/{name}", "models/{name}/versions/{version}")
        for variant in {path, versions} if path.startswith("/v2/models/") else {path}:
            described = _operation(kind, summary, variant, query, errors.split())
            paths.setdefault(variant, {})[method.lower()] = described
    paths["/models"]["post"]["responses"]["200"]["links"] = {
        name: {
            "operationRef": f"#/paths/{path.replace('/', '~1')}/{method}",
            "parameters": {"name": "$request.body#/model_name"},
        }
        for name, (path, method) in LINKS.items()
        if path in paths
    }
    schemas = json.loads(SCHEMAS.read_text("utf-8"))
    schemas["ModelSettings"]["properties"] = model_settings.schema()
    schemas["Load"]["properties"] |= model_settings.schema()
    return {
        "openapi": "3.1.0",
        "info": {"title": "KoGPT2 serving", "version": "0.1.0", "description": DESCRIPTION},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(kind: str, summary: str, path: str, query: str, errors: list[str]) -> dict[str, Any]:
    error, sent, answered = KINDS[kind]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    for name, _, of in (field.partition("=") for field in query.split("&") if field):
        parameters.append({"name": name, "in": "query", "schema": {"type": of}})
    if "invocations" in path:
        parameters += [
            {"name": name, "in": "header", "schema": {"type": "string"}, "description": description}
            for name, description in HEADERS.items()
        ]
    refused = {"description": "the message says why", "content": _content({JSON: error})}
    done: dict[str, Any] = {"description": "done"}
    if answered:
        done["content"] = _content(answered)
    described = {
        "tags": [TAGS.get(kind, kind)],
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": done, **dict.fromkeys(errors, refused)},
    }
    return described | ({"requestBody": {"content": _content(sent)}} if sent else {})


def _content(kinds: dict[str, Any]) -> dict[str, Any]:
    def schema(named: Any) -> dict[str, Any]:
        if isinstance(named, tuple):
            return {"anyOf": [schema(one) for one in named]}
        return {"$ref": f"#/components/schemas/{named}"}

    return {kind: {"schema": schema(named)} for kind, named in kinds.items()}


def of_model(name: str) -> dict[str, Any]:
    """The same of calling one model."""
    described = document()
    operation = described["paths"]["/predictions/{name}"]["post"]
    path = "/predictions/" + quote(name, safe="")
    described["paths"] = {path: {"post": {**operation, "parameters": []}}}
    return described


def page(described: dict[str, Any]) -> str:
    """A document as one HTML page of its own."""
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
