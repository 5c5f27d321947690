"""The handler for text models (any GPT-2), whose tokens the engine process generates."""

from __future__ import annotations

import functools
from typing import Any

from common.media_types import JSON
from common.settings import read_settings
from engine.http.client import EngineClient, ModelHandle
from handlers.model_spec import client_name
from handlers.payload import answer_type, format_answer, parse, sequences_of
from handlers.request_id import request_id, token_counts
from handlers.settings import Settings
from handlers.text import classifier, v2

IN_ENGINE = True


@functools.cache
def _client() -> EngineClient:
    return EngineClient(read_settings(Settings).engine_socket)


def model_fn(model_dir: str, name: str | None = None, **options: Any) -> ModelHandle:
    """Load an artifact into the engine, by default under its path. Raises `EngineError`."""
    return ModelHandle(_client(), name or model_dir, model_dir, **options)


def describe(model: ModelHandle) -> dict[str, Any]:
    """Return the answer to `GET /v2/models/{name}`."""
    name = client_name(model.model["name"])
    if (about := model.model.get("classifier")) is not None:
        return classifier.metadata(name, about)
    return v2.metadata(name)


def transform_fn(
    model: ModelHandle, body: bytes, content_type: str | None, accept: str | None, timeout_s: float
) -> tuple[bytes, str]:
    """Continue the prompt in `body`, see `handlers.payload`, or classify its texts.

    Raises `EngineError`.
    """
    if "classifier" in model.model:
        return classifier.answer(model, body, content_type, accept, timeout_s)
    v2_request, request = v2.parse(body, content_type) or (None, parse(body, content_type))
    media_type = JSON if v2_request is not None else answer_type(accept, request.body_kind)
    answer = model.generate(request.inputs, request.parameters, timeout_s, request_id.get())
    generated = sum(completion["tokens"] for completion in answer["completions"])
    token_counts.set((answer["prompt_tokens"], generated))
    if v2_request is not None:
        return v2.answer(
            v2_request, sequences_of(request, answer), client_name(model.model["name"])
        )
    return format_answer(request, answer, media_type)
