"""Chooses the handler that serves a model, by the files in the model's folder."""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

from common.errors import ArtifactError
from handlers.tensors import files
from handlers.user_code.entry_point import Script, find_script

# The module with `IN_ENGINE`, by its name: the gateway calls `is_hosted`, and must not import MXNet
# with the module of a symbol.
TEXT = "handlers.text.text_model"


class Handler(Protocol):
    """A module that loads one kind of artifact and answers requests for it.

    Optional: `FOR_SCRIPTS`, a module whose `model_fn` loads the model as users' scripts expect it.
    """

    IN_ENGINE: bool  # whether the engine process holds the model, or the worker itself

    def model_fn(self, model_dir: str, name: str | None = None) -> Any:
        """Load the model in `model_dir`. Raises `common.errors.EngineError` with the reason."""

    def describe(self, model: Any) -> dict[str, Any]:
        """Return the answer to `GET /v2/models/{name}`."""

    def transform_fn(
        self,
        model: Any,
        body: bytes,
        content_type: str | None,
        accept: str | None,
        timeout_s: float,
    ) -> tuple[bytes, str]:
        """Answer a request: returns the body and its content type. Raises `EngineError`."""


def brings_script(model_dir: str | os.PathLike[str], handler: str | None = None) -> bool:
    """Return whether Python code in the model's folder serves the model."""
    try:
        return find_script(model_dir, handler) is not None
    except (ArtifactError, OSError):
        return True  # `handler_for` raises the error when the model is loaded


def has_handler(model_dir: str | os.PathLike[str], handler: str) -> bool:
    """Return whether the server's default `handler` is in the model, which has no manifest."""
    try:
        script = find_script(model_dir, handler) if handler else None
    except (ArtifactError, OSError):
        return False
    return script is not None and script.manifest is None


def is_hosted(model_dir: str | os.PathLike[str], handler: str | None = None) -> bool:
    """Return whether the engine holds the model, so that `handlers.host` serves it."""
    return not brings_script(model_dir, handler) and _module(model_dir) == TEXT


def computes_tensors(model_dir: str | os.PathLike[str], handler: str | None = None) -> bool:
    """Return whether the worker computes the model: an ONNX graph or MXNet symbol, no script."""
    return not brings_script(model_dir, handler) and _module(model_dir) != TEXT


def handler_for(model_dir: str, handler: str | None = None) -> Handler | Script:
    """Find the model's own script, or else the built-in handler. Raises `ArtifactError`."""
    return find_script(model_dir, handler) or built_in(model_dir)


def built_in(model_dir: str) -> Handler:
    """Import the built-in handler for the model's files."""
    return importlib.import_module(_module(model_dir))


def _module(model_dir: str | os.PathLike[str]) -> str:
    folder = os.fspath(model_dir)
    if files.is_symbol(folder):
        return "handlers.tensors.symbol"
    return "handlers.tensors.onnx_graph" if files.is_graph(folder) else TEXT
