"""Detects which convention a model's script follows, by the functions and classes it defines.

model_fn, transform_fn, input_fn, predict_fn, output_fn    the SageMaker Inference Toolkit's
load_model(model_dir), predict(model, payload)             the payload is the batch
handle(data, context), or a class with initialize/handle   Multi Model Server's

A script that defines none of them is served by the defaults, as on SageMaker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from common.errors import EngineError
from handlers.user_code.conventions.batch import LoadAndPredict, MMSService, find_handler
from handlers.user_code.conventions.toolkit import FUNCTIONS, SageMakerFunctions
from handlers.user_code.messages import Answer, Request


class Service(Protocol):
    """A model's script, with the same methods for each convention."""

    def load(self) -> None:
        """Load the model. Raises what the script raises."""

    def answer(self, requests: list[Request], timeout_s: float) -> Sequence[Answer | EngineError]:
        """Return one answer per request. Raises what the script raises for the whole batch."""


def service_of(module: ModuleType, spec: Mapping[str, Any]) -> Service:
    """Wrap a script by the convention it follows. Raises `ArtifactError` if it breaks that one."""
    is_service = spec["is_service"] or spec["entry"]
    handler = find_handler(module, spec["entry"])
    if handler is not None and is_service:
        return MMSService(handler, spec)
    if any(callable(getattr(module, name, None)) for name in FUNCTIONS):
        return SageMakerFunctions(module, spec)
    if callable(getattr(module, "load_model", None)):
        return LoadAndPredict(module, spec)
    return SageMakerFunctions(module, spec) if handler is None else MMSService(handler, spec)
