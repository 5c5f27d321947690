"""Checks the bodies of the engine's requests, and renders tokens as JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from common.errors import InvalidRequest
from common.json_body import read_json
from engine.generation import Token
from engine.http.answer import choices_body, guesses_body, token_details
from engine.sequence import Sequence
from engine.text.prompts import Chat, Inputs, Raw

LARGE_BYTES = 64 << 10  # larger bodies are parsed on a thread, which takes milliseconds


def json_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def prompt_body(sequence: Sequence) -> dict[str, Any]:
    return {"prompt_tokens": len(sequence.prompt), "cached_tokens": sequence.cached_tokens}


def token_body(token: Token) -> dict[str, Any]:
    body: dict[str, Any] = {"index": token.index, "token": token.id, "text": token.text}
    body |= token_details(token) | guesses_body([token])
    if token.choices:
        body["choice_logprobs"] = choices_body(token)
    if token.finish_reason is not None:
        body["finish_reason"] = token.finish_reason
    return body


async def json_object(request: Request) -> dict[str, Any]:
    content = await request.body()
    large = len(content) > LARGE_BYTES
    body = await run_in_threadpool(read_json, content) if large else read_json(content)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def text_of(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidRequest(f"{name} must be text that is not empty, without NUL")
    return value


def texts_of(body: dict[str, Any]) -> list[list[str]]:
    """Return the texts to classify, each as a list of a text or a pair. Raises `InvalidRequest`."""
    texts = body.get("inputs")
    if not isinstance(texts, list) or not texts:
        raise InvalidRequest("inputs must be a list of texts that is not empty")
    for i, parts in enumerate(texts):
        if not isinstance(parts, list) or len(parts) not in (1, 2):
            raise InvalidRequest(f"inputs.{i} must be a list of one text or two")
        for part in parts:
            if not isinstance(part, str) or not part or "\0" in part:
                raise InvalidRequest(f"inputs.{i} must be text that is not empty, without NUL")
    return texts


def inputs_of(body: dict[str, Any]) -> Inputs:
    """Return the inputs in a request's body. Raises `InvalidRequest`."""
    if "prompt" in body:
        return _raw(body["prompt"])
    if "messages" in body:
        return _chat(body["messages"])
    fields = body.get("inputs")
    if not isinstance(fields, dict):
        return text_of(body, "inputs")
    for name, value in fields.items():
        if not isinstance(value, str) or "\0" in value:
            raise InvalidRequest(f"inputs.{name} must be text without NUL")
    return fields


def _raw(prompt: Any) -> Raw:
    """Check that a prompt is a text or a list of token ids. Raises `InvalidRequest`."""
    if isinstance(prompt, list) and all(type(i) is int and i >= 0 for i in prompt):
        return Raw(prompt)
    if not isinstance(prompt, str) or "\0" in prompt:
        raise InvalidRequest("prompt must be text without NUL, or a list of token ids")
    return Raw(prompt)


def _chat(messages: Any) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list that is not empty")
    for i, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and {"role", "content"} <= set(message)
            and all(isinstance(v, str) and "\0" not in v for v in message.values())
        ):
            raise InvalidRequest(f"messages.{i} must have a role and content, texts without NUL")
    return Chat(messages)
