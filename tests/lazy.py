"""Modules that are imported by the test that first uses them, because their import takes a second
or more and each worker of xdist collects all tests."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module, or for a name in it such as `common.mxnet_compat:mx`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest reads some of whatever a module holds
            raise AttributeError(attribute)
        module, _, name = self._name.partition(":")
        imported: Any = importlib.import_module(module)
        return getattr(getattr(imported, name) if name else imported, attribute)


mx = Lazy("common.mxnet_compat:mx")
mxnet_model = Lazy("engine.backends.mxnet.model")
mxnet_operator = Lazy("engine.native.mxnet_operator")
openai = Lazy("openai")
symbol = Lazy("handlers.tensors.symbol")
symbol_module = Lazy("handlers.tensors.symbol_module")
training = Lazy("scripts.artifacts.training")
