"""OpenAI's routes in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from common.parameters import MAX_LOGPROBS, MAX_SEQUENCES, MAX_STOPS
from serving.api.openai.asked import DEFAULT_TOKENS

TAG = "OpenAI"
ERRORS = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503, 504, 507)


def paths(name: dict[str, Any]) -> dict[str, Any]:
    """`name` is the parameter of a path with a model."""
    return {
        "/v1/models": {"get": _operation("List the models of the store", None, (401, 503))},
        "/v1/models/{name}": {
            "get": {
                **_operation("Whether there is such a model", None, (401, 404, 503)),
                "parameters": [name],
            }
        },
        "/v1/completions": {"post": _operation("Continue texts or token ids", "Completion")},
        "/v1/chat/completions": {"post": _operation("Answer a chat", "Chat")},
    }


def _operation(summary: str, body: str | None, errors: tuple[int, ...] = ERRORS) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIError"}}}
    described: dict[str, Any] = {
        "tags": [TAG],
        "summary": summary,
        "parameters": [],
        "responses": {
            "200": {"description": "as OpenAI's specification has it"},
            **{str(s): {"description": "the message says why", "content": error} for s in errors},
        },
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/OpenAI{body}"}
        described["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        kinds = ("application/json", "text/event-stream")
        described["responses"]["200"]["content"] = {k: {"schema": {}} for k in kinds}
    return described


def schemas() -> dict[str, Any]:
    integer, text, boolean = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
    texts, ids = {"type": "array", "items": text}, {"type": "array", "items": integer}
    shared: dict[str, Any] = {
        "model": text,
        "stream": {**boolean, "default": False},
        "stream_options": {"type": "object", "properties": {"include_usage": boolean}},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2, "default": 1},
        "top_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 1},
        "n": {**integer, "minimum": 1, "maximum": MAX_SEQUENCES, "default": 1},
        "stop": {"oneOf": [text, {**texts, "maxItems": MAX_STOPS}]},
        "seed": integer,
        "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
        "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
        "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
        "top_k": {**integer, "minimum": 0},
        "repetition_penalty": {"type": "number"},
    }
    count = {**integer, "minimum": 0, "maximum": MAX_LOGPROBS}
    completion = {
        **shared,
        "prompt": {"oneOf": [text, texts, ids, {"type": "array", "items": ids}]},
        "max_tokens": {**integer, "minimum": 0, "default": DEFAULT_TOKENS},
        "best_of": {**integer, "minimum": 1, "maximum": MAX_SEQUENCES, "default": 1},
        "echo": {**boolean, "default": False},
        "logprobs": count,
    }
    message = {"type": "object", "required": ["role"], "properties": {"role": text}}
    chat = {
        **shared,
        "messages": {"type": "array", "items": message, "minItems": 1},
        "max_completion_tokens": {**integer, "minimum": 1},
        "max_tokens": {**integer, "minimum": 1, "deprecated": True},
        "logprobs": boolean,
        "top_logprobs": count,
    }
    error = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
    return {
        "OpenAICompletion": _object(completion, "model", "prompt"),
        "OpenAIChat": _object(chat, "model", "messages"),
        "OpenAIError": _object({"error": _object(error, *error)}, "error"),
    }


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}
