"""Which handler serves a model: by what its folder holds."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import ArtifactError
from handlers.tensors import files
from handlers.user_code.entry_point import find_script

if TYPE_CHECKING:
    from handlers.user_code.handler import ScriptHandler


class Handler(Protocol):
    """A module (or object) that loads one kind of artifact and answers for it.

    One may have `describe(model)`, what `GET /v2/models/{name}` answers, and `FOR_SCRIPTS`, whose
    `model_fn` loads the model as scripts know it.
    """

    # Whether the engine process holds the model; else the worker itself does.
    IN_ENGINE: bool

    def model_fn(self, model_dir: str, name: str | None = None) -> Any:
        """Loads the model in `model_dir`. Raises `common.errors.EngineError` with the reason."""

    def transform_fn(
        self,
        model: Any,
        body: bytes | bytearray | str,
        content_type: str | None,
        accept: str | None,
        timeout_s: float | None = None,
    ) -> tuple[bytes, str]:
        """The answer's bytes and content type. Raises `EngineError`."""


def brings_script(model_dir: str | os.PathLike[str], handler: str | None = None) -> bool:
    """Whether the model's own Python answers for it."""
    try:
        return find_script(model_dir, handler) is not None
    except (ArtifactError, OSError):
        return True  # a broken one, for `handler_for` to refuse


def has_handler(model_dir: str | os.PathLike[str], handler: str) -> bool:
    """Whether `handler`, which is nobody's in particular, is there and the model names no other."""
    try:
        script = find_script(model_dir, handler) if handler else None
    except (ArtifactError, OSError):
        return False
    return script is not None and script.manifest is None


def is_hosted(model_dir: str | os.PathLike[str], handler: str | None = None) -> bool:
    """Whether the engine holds the model, so that `handlers.host` answers for it."""
    return not brings_script(model_dir, handler) and not _holds_tensors(model_dir)


def computes_tensors(model_dir: str | os.PathLike[str], handler: str | None = None) -> bool:
    """Whether the model's own worker computes it, as it came: an ONNX graph or MXNet symbol."""
    return not brings_script(model_dir, handler) and _holds_tensors(model_dir)


def _holds_tensors(model_dir: str | os.PathLike[str]) -> bool:
    folder = os.fspath(model_dir)
    return files.is_symbol(folder) or files.is_graph(folder)


def handler_for(model_dir: str, handler: str | None = None) -> Handler | ScriptHandler:
    """`handler` is what the load request names. Raises `ArtifactError` for what no one serves."""
    script = find_script(model_dir, handler)
    if script is not None:
        from handlers.user_code.handler import ScriptHandler

        return ScriptHandler(script)
    return built_in(model_dir)


def built_in(model_dir: str) -> Handler:
    """The handler for a model without a script, by its files. Raises `ArtifactError`."""
    from handlers.text import text_model

    if files.is_symbol(model_dir):
        return importlib.import_module("handlers.tensors.symbol")
    if files.is_graph(model_dir):
        return importlib.import_module("handlers.tensors.onnx_graph")
    return text_model
