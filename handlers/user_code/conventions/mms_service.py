"""Runs scripts with Multi Model Server's `handle(data, context)`, a function or in a class.

It does so as mms/model_loader.py and mms/service.py (1.1.11) do, but reports the reason of an error
to the client, also of an error in `initialize`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from common.errors import ArtifactError, EngineError, InvalidRequest
from handlers.user_code.conventions.load_and_predict import answers_of_batch
from handlers.user_code.conventions.mms_context import ScriptContext, decode
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
        return answers_of_batch(values, context, self._what)
