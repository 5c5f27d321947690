"""Chooses the defaults for functions that a script does not define, by the type of its model."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from handlers.user_code.module import server_imports


class Defaults(Protocol):
    """Each function raises `EngineError` for a mistake of the client or the script."""

    def input_fn(self, body: bytes | str, content_type: str | None, model: Any) -> Any: ...

    def predict_fn(self, data: Any, model: Any, timeout_s: float) -> Any: ...

    def output_fn(self, prediction: Any, accept: str) -> Any:
        """Returns the body, or body and content type."""


def defaults_for(model: Any, fallback: Defaults) -> Defaults:
    """The SageMaker MXNet container's defaults for MXNet's modules and blocks, else `fallback`."""
    mxnet = sys.modules.get("mxnet")  # imported by the script if the model is MXNet's
    with server_imports():
        if mxnet is not None and isinstance(model, mxnet.mod.BaseModule):
            from handlers.tensors import symbol_module

            return symbol_module
        if mxnet is not None and isinstance(model, mxnet.gluon.Block):
            from handlers.user_code.conventions import gluon_block

            return gluon_block
    return fallback
