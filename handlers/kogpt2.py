"""The built-in handler: a KoGPT2 fine-tune, its tokens made by the engine process."""

from __future__ import annotations

import functools

from engine.client import EngineClient, ModelHandle
from handlers.payload import answer_type, format_answer, parse
from handlers.request_id import request_id
from handlers.settings import Settings

IN_ENGINE = True


@functools.cache
def _settings() -> Settings:
    return Settings.from_environment()


@functools.cache
def _client() -> EngineClient:
    return EngineClient(_settings().engine_socket)


def model_fn(model_dir: str, name: str | None = None) -> ModelHandle:
    """Has the engine load the artifact in `model_dir`, under `name` or else under its path.

    Raises `engine.errors.EngineError`: `ArtifactError`, `OutOfMemory`, `EngineUnavailable`.
    """
    return ModelHandle(_client(), name or model_dir, model_dir)


def transform_fn(
    model: ModelHandle,
    body: bytes | bytearray | str,
    content_type: str | None,
    accept: str | None,
    timeout_s: float | None = None,
) -> tuple[bytes, str]:
    """Continues the prompt in `body`; see `handlers.payload` for the formats.

    Returns the answer's bytes and content type. Raises `engine.errors.EngineError`.
    """
    timeout_s = timeout_s or _settings().request_timeout_s
    request = parse(body, content_type)
    media_type = answer_type(accept, request.form)
    answer = model.generate(request.inputs, request.parameters, timeout_s, request_id.get())
    return format_answer(request, answer, media_type)
