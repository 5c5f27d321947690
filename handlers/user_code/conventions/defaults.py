"""The functions that stand in for those that a script leaves out, by what its model is."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from handlers.user_code.module import ours


class Defaults(Protocol):
    """Each raises `EngineError` for what the client or the script got wrong."""

    def input_fn(self, body: bytes | str, content_type: str | None, model: Any) -> Any: ...

    def predict_fn(self, data: Any, model: Any, timeout_s: float) -> Any: ...

    def output_fn(self, prediction: Any, accept: str) -> Any:
        """The body, or body and content type."""


def defaults_for(model: Any, other: Defaults) -> Defaults:
    """The SageMaker MXNet container's for MXNet's modules and blocks, else the `other`."""
    mxnet = sys.modules.get("mxnet")  # a model of its kinds has imported it
    with ours():
        if mxnet is not None and isinstance(model, mxnet.mod.BaseModule):
            from handlers.tensors import symbol_module

            return symbol_module
        if mxnet is not None and isinstance(model, mxnet.gluon.Block):
            from handlers.user_code.conventions import gluon_block

            return gluon_block
    return other
