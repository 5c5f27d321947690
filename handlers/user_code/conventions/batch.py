"""Runs scripts that answer a batch: a list of one dict per request, with a list of as many answers.

Multi Model Server's `handle(data, context)`, a function or in a class, is called as
mms/model_loader.py and mms/service.py (1.1.11) do, but the client gets the reason of an error, also
of an error in `initialize`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from common.errors import ArtifactError, EngineError, InvalidRequest
from handlers.user_code.conventions.mms_context import ScriptContext, decode, to_answer
from handlers.user_code.messages import Answer, Request, ScriptError

STEPS = ("preprocess", "inference", "postprocess")


def find_handler(module: ModuleType, entry: str | None) -> Any:
    """Find `entry`, else `handle`, else the only class that can handle requests, else None."""
    if entry is not None:
        handler = getattr(module, entry, None)
        if not callable(handler):
            raise ArtifactError(
                f"the handler {module.__name__}:{entry} is not in {module.__name__}.py"
            )
        return handler
    if callable(getattr(module, "handle", None)):
        return module.handle
    classes = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if c.__module__ == module.__name__ and _can_handle(c)
    ]
    # Base classes of other classes are not candidates.
    classes = [c for c in classes if not any(o is not c and issubclass(o, c) for o in classes)]
    return classes[0] if len(classes) == 1 else None


def _can_handle(kind: type) -> bool:
    return hasattr(kind, "handle") or all(hasattr(kind, step) for step in STEPS)


class MMSService:
    """A script with a function `handle`, or a class with `handle` or three steps."""

    def __init__(self, handler: Any, spec: Mapping[str, Any]) -> None:
        self._handler, self._spec = handler, spec
        self._what = getattr(handler, "__name__", "handle")
        if inspect.isclass(handler) and not _can_handle(handler):
            raise ArtifactError(
                f"the class {self._what} has no handle(data, context), must have it or"
                f" {', '.join(STEPS)}"
            )

    def load(self) -> None:
        context = ScriptContext(self._spec)
        if not inspect.isclass(self._handler):
            self._handle: Callable[[Any, Any], Any] = self._handler
            self._handle(None, context)  # MMS's convention for loading with a function
            return
        service: Any = self._handler()
        if hasattr(service, "initialize"):
            service.initialize(context)
        if hasattr(service, "handle"):
            self._handle, self._what = service.handle, f"{self._what}.handle"
        else:
            self._handle = lambda data, context: service.postprocess(
                service.inference(service.preprocess(data))
            )

    def answer(self, requests: list[Request], timeout_s: float) -> Sequence[Answer | EngineError]:
        answers: list[Answer | EngineError | None] = []
        readable: list[Request] = []
        data = []
        for request in requests:
            try:
                data.append(decode(request))
            except InvalidRequest as error:  # must not fail the rest of the batch
                answers.append(error)
            else:
                readable.append(request)
                answers.append(None)
        handled = iter(self._call(data, readable) if data else [])
        return [next(handled) if answer is None else answer for answer in answers]

    def _call(self, data: list[Any], requests: list[Request]) -> list[Answer | EngineError]:
        from mms.service import PredictionException

        context = ScriptContext(self._spec, requests)
        try:
            values = self._handle(data, context)
        except PredictionException as error:
            status = error.error_code if isinstance(error.error_code, int) else 500
            raise ScriptError(str(error.message), status, "PredictionException") from None
        return _answers_of_batch(values, context, self._what)


class LoadAndPredict:
    """A script with `load_model(model_dir)` and `predict(model, payload)`.

    `payload` has the bodies as bytes, `payload[0]["body"]`, whatever their type.
    """

    def __init__(self, module: ModuleType, spec: Mapping[str, Any]) -> None:
        if not callable(getattr(module, "predict", None)):
            raise ArtifactError(
                "the script defines load_model without predict(model, payload), must define both"
            )
        self._module, self._spec = module, spec

    def load(self) -> None:
        self._model = self._module.load_model(self._spec["root"])

    def answer(self, requests: list[Request], timeout_s: float) -> Sequence[Answer | EngineError]:
        payload = [{part.name: part.value for part in request.parts} for request in requests]
        values = self._module.predict(self._model, payload)
        return _answers_of_batch(values, ScriptContext(self._spec, requests), "predict")


def _answers_of_batch(values: Any, context: ScriptContext, what: str) -> list[Answer | EngineError]:
    """Convert a script's list of results, one per request. Raises `ScriptError` for others."""
    if not isinstance(values, list):
        raise ScriptError(
            f"{what} returned a {type(values).__name__}, must return a list with an answer for each"
            " request"
        )
    processors = context.request_processor
    if len(values) != len(processors):
        raise ScriptError(
            f"{what} returned {len(values)} answers, must return one for each request"
            f" ({len(processors)})"
        )
    answers: list[Answer | EngineError] = []
    for value, processor in zip(values, processors, strict=True):
        try:
            answers.append(to_answer(value, None, processor, what))
        except ScriptError as error:
            answers.append(error)
    return answers
