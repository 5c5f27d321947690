"""The OpenAPI document of both ports, and a page that shows it without any outside host."""

from __future__ import annotations

import html
import json
from typing import Any
from urllib.parse import quote

from common.parameters import Parameters
from serving.api.openai import description as openai
from serving.models import model_settings

ERROR = {"$ref": "#/components/schemas/Error"}
V2_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    target = {
        "name": "X-Amzn-SageMaker-Target-Model",
        "in": "header",
        "schema": {"type": "string"},
        "description": "which model, as a path below the store: `poem.tar.gz`",
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "KoGPT2 serving",
            "version": "0.1.0",
            "description": "Serves many fine-tunes of KoGPT2 at once. The port for requests answers"
            " every route, the management port those under `management`.",
        },
        "paths": {
            "/ping": {"get": _operation("health", "200 when a request would work", errors=(503,))},
            "/metrics": {"get": _operation("health", "Prometheus metrics")},
            "/models": {
                "post": _operation(
                    "management",
                    "Load a model",
                    body={"$ref": "#/components/schemas/Load"},
                    errors=(400, 401, 403, 404, 408, 409, 413, 415, 500, 503, 504, 507),
                ),
                "get": _operation(
                    "management",
                    "List the loaded models; with `available=true` what the store offers",
                    parameters=[
                        _query("limit", "integer"),
                        _query("next_page_token", "string"),
                        _query("available", "boolean"),
                    ],
                    errors=(400, 401),
                ),
            },
            "/models/{name}": {
                "get": _operation("management", "Describe a model", [name], errors=(401, 404)),
                "put": _operation(
                    "management",
                    "Change how many requests are passed on to a model at once, or pin it",
                    [
                        name,
                        _query("min_worker", "integer"),
                        _query("max_worker", "integer"),
                        _query("pinned", "boolean"),
                    ],
                    errors=(400, 401, 404, 503),
                ),
                "delete": _operation(
                    "management",
                    "Unload a model; answers once its memory is free",
                    [name],
                    errors=(401, 404, 503),
                ),
            },
            "/models/{name}/invoke": {"post": _generation("SageMaker multi-model", [name])},
            "/predictions/{name}": {
                "post": _generation("Multi Model Server", [name]),
                "options": _operation("inference", "This, of one model", [name], errors=(401, 404)),
            },
            "/{name}/predict": {"post": _generation("Multi Model Server's legacy route", [name])},
            "/invocations": {"post": _generation("SageMaker", [target])},
            **openai.paths(name),
            **_v2(name),
        },
        "components": {"schemas": {**_schemas(), **openai.schemas()}},
    }


def of_model(name: str) -> dict[str, Any]:
    """The same of calling one model."""
    described = document()
    operation = described["paths"]["/predictions/{name}"]["post"]
    path = "/predictions/" + quote(name, safe="")
    described["paths"] = {path: {"post": {**operation, "parameters": []}}}
    return described


def _operation(
    tag: str,
    summary: str,
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
    errors: tuple[int, ...] = (),
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [tag],
        "summary": summary,
        "parameters": parameters or [],
        "responses": {"200": {"description": "done"}},
    }
    if body is not None:
        described["requestBody"] = {"content": {"application/json": {"schema": body}}}
    for status in errors:
        described["responses"][str(status)] = {
            "description": "the message says why",
            "content": {"application/json": {"schema": ERROR}},
        }
    return described


def _generation(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"oneOf": [{"$ref": "#/components/schemas/Generate"}, {"type": "string"}]}
    errors = (400, 401, 404, 406, 408, 413, 415, 429, 500, 503, 504, 507)
    described = _operation("inference", f"Continue a prompt ({summary})", parameters, body, errors)
    described["requestBody"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    described["responses"]["200"]["content"] = {
        "application/json": {
            "schema": {
                "oneOf": [
                    {"$ref": "#/components/schemas/Generated"},
                    {"$ref": "#/components/schemas/Guide"},
                ]
            }
        },
        "text/plain": {"schema": {"type": "string"}},
        "text/event-stream": {"schema": {"type": "string"}},
        "application/x-ndjson": {"schema": {"type": "string"}},
    }
    return described


def _v2(name: dict[str, Any]) -> dict[str, Any]:
    """The routes of the Open Inference Protocol."""
    tag = "Open Inference Protocol"
    errors = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504, 507)
    schema = {"$ref": "#/components/schemas/Infer"}
    infer = _operation(tag, "Tensors in, tensors out", [name], schema, errors)
    text = {"type": "string"}
    body = {
        "type": "object",
        "required": ["text_input"],
        "properties": {"id": text, "text_input": text, "parameters": {"type": "object"}},
    }
    binary = {"schema": {"type": "string", "format": "binary"}}
    infer["requestBody"]["content"]["application/octet-stream"] = binary
    infer["responses"]["200"]["content"] = {
        "application/json": {"schema": {"$ref": "#/components/schemas/Inferred"}},
        "application/octet-stream": binary,
    }
    described = _operation(
        tag, "The model's inputs and outputs", [name], errors=(400, 401, 404, 503, 504, 507)
    )
    ready = _operation(tag, "200 when the model is loaded", [name], errors=(400, 401, 404, 503))
    paths = {
        "/v2": {"get": _operation(tag, "The server's name and extensions")},
        "/v2/health/live": {"get": _operation(tag, "200 as long as the server answers")},
        "/v2/health/ready": {"get": _operation(tag, "As /ping", errors=(503,))},
        "/v2/models/{name}": {"get": described},
        "/v2/models/{name}/ready": {"get": ready},
        "/v2/models/{name}/infer": {"post": infer},
        "/v2/models/{name}/config": {"get": _operation(tag, "As Triton describes it", [name])},
        "/v2/models/{name}/stats": {"get": _operation(tag, "What is counted of it", [name])},
        "/v2/models/stats": {"get": _operation(tag, "The same of all that are loaded")},
        **{
            f"/v2/models/{{name}}/{route}": {"post": _operation(tag, summary, [name], body, errors)}
            for route, summary in (
                ("generate", "Continue a text"),
                ("generate_stream", "The same, in server-sent events"),
            )
        },
        "/v2/repository/index": {"post": _operation(tag, "The store's models and their states")},
        **{
            f"/v2/repository/models/{{name}}/{what}": {
                "post": _operation(tag, f"To {what} a model", [name], None, errors)
            }
            for what in ("load", "unload")
        },
    }
    for methods in paths.values():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    response["content"]["application/json"]["schema"] = V2_ERROR
    return paths


def _query(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": kind}}


def _schemas() -> dict[str, Any]:
    integer, text, number = {"type": "integer"}, {"type": "string"}, {"type": "number"}
    parameters = {
        "max_new_tokens": {**integer, "minimum": 1, "default": Parameters.max_new_tokens},
        "stop": {"oneOf": [text, {"type": "array", "items": text}]},
        "do_sample": {"type": "boolean"},
        "temperature": {**number, "exclusiveMinimum": 0},
        "top_k": {**integer, "minimum": 0},
        "top_p": {**number, "exclusiveMinimum": 0, "maximum": 1},
        "repetition_penalty": {**number, "exclusiveMinimum": 0},
        "frequency_penalty": {**number, "minimum": -2, "maximum": 2},
        "presence_penalty": {**number, "minimum": -2, "maximum": 2},
        "logit_bias": {"type": "object", "additionalProperties": number},
        "seed": {**integer, "minimum": 0},
        "num_return_sequences": {**integer, "minimum": 1, "maximum": 16},
        "logprobs": {**integer, "minimum": 0, "maximum": 20},
        "return_full_text": {"type": "boolean"},
        "decoder_input_details": {"type": "boolean"},
    }
    return {
        "Load": {
            "type": "object",
            "required": ["url"],
            "properties": {
                "model_name": text,
                "url": text,
                "handler": text,
                "initial_workers": integer,
                "batch_size": integer,
                "max_batch_delay": integer,
                "response_timeout": integer,
                "synchronous": {"type": "boolean"},
                **model_settings.schema(),
            },
        },
        "ModelSettings": {
            "type": "object",
            "description": "What serving.json beside a model may hold, and a load request, too",
            "additionalProperties": False,
            "properties": model_settings.schema(),
        },
        "Generate": {
            "type": "object",
            "required": ["inputs"],
            "additionalProperties": False,
            "properties": {
                "inputs": text,
                "parameters": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": parameters,
                },
                "stream": {"type": "boolean", "default": False},
            },
        },
        "Generated": {
            "type": "object",
            "properties": {
                "generated_text": text,
                "tokens": integer,
                "finish_reason": {"enum": ["stop", "length"]},
                "seconds": number,
            },
        },
        "Guide": {
            "description": "of a JSON string: the text with its prompt, steps, seconds",
            "type": "array",
            "prefixItems": [text, integer, number],
        },
        "Infer": {
            "type": "object",
            "required": ["inputs"],
            "additionalProperties": False,
            "properties": {
                "id": text,
                "parameters": {"type": "object"},
                "inputs": {"type": "array", "items": _tensor("name", "shape", "datatype", "data")},
                "outputs": {"type": "array", "items": _tensor("name")},
            },
        },
        "Inferred": {
            "type": "object",
            "properties": {
                "model_name": text,
                "model_version": text,
                "id": text,
                "outputs": {"type": "array", "items": _tensor("name", "shape", "datatype", "data")},
            },
        },
        "Error": {
            "type": "object",
            "required": ["code", "type", "message"],
            "properties": {"code": integer, "type": text, "message": text},
        },
    }


def _tensor(*fields: str) -> dict[str, Any]:
    known = {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array"},
    }
    kept = {name: schema for name, schema in known.items() if name in (*fields, "parameters")}
    return {"type": "object", "required": ["name"], "properties": kept}


def page() -> str:
    """The document as one HTML page of its own."""
    rows = []
    described = document()
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
