"""The conventions that a model's script may follow, told apart by what it defines.

model_fn, transform_fn, input_fn, predict_fn, output_fn    the SageMaker Inference Toolkit's
load_model(model_dir), predict(model, payload)             the payload is the batch
handle(data, context), or a class with initialize/handle   Multi Model Server's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from engine.errors import EngineError
from handlers.scripts.batches import LoadAndPredict
from handlers.scripts.messages import Answer, Request, ScriptError
from handlers.scripts.service import HandlerService, find_handler
from handlers.scripts.toolkit import FUNCTIONS, SageMakerFunctions


class Service(Protocol):
    """A script that can be asked."""

    def load(self) -> None:
        """Loads the model. Raises what the script raises."""

    def answer(self, requests: list[Request], timeout_s: float) -> Sequence[Answer | EngineError]:
        """One for each request; or raises what the script raises, for all of them."""


def service_of(module: ModuleType, orders: Mapping[str, Any]) -> Service:
    """Raises `ScriptError` for a script that follows no convention."""
    is_service = orders["is_service"] or orders["entry"]
    handler = find_handler(module, orders["entry"])
    if handler is None or not is_service:
        if any(callable(getattr(module, name, None)) for name in FUNCTIONS):
            return SageMakerFunctions(module, orders)
        if callable(getattr(module, "load_model", None)):
            return LoadAndPredict(module, orders)
    if handler is None:
        raise ScriptError(
            f"{module.__name__}.py defines nothing that can be served: it must define model_fn"
            " and transform_fn (or input_fn, predict_fn, output_fn), or load_model and predict,"
            " or handle(data, context), or one class with initialize and handle",
            400,
            "ArtifactError",
        )
    return HandlerService(handler, orders)
