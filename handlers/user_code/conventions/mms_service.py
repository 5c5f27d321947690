"""Services of Multi Model Server's own kind: `handle(data, context)`, or a class that has it.

As mms/model_loader.py and mms/service.py (1.1.11) run them, but for what a client is told: there an
error of `initialize` is lost, and errors have no reasons.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from common.errors import ArtifactError, EngineError, InvalidRequest
from handlers.user_code.conventions.load_and_predict import answers_of_batch
from handlers.user_code.conventions.mms_context import ScriptContext, decoded
from handlers.user_code.messages import Answer, Request, ScriptError

STEPS = ("preprocess", "inference", "postprocess")


def find_handler(module: ModuleType, entry: str | None) -> Any:
    """The function or class that answers: the one named `entry`, else `handle`, else the only class
    that can. None if there is none, or several. Raises `ArtifactError` if `entry` is not there."""
    if entry is not None:
        found = getattr(module, entry, None)
        if not callable(found):
            raise ArtifactError(
                f"the handler {module.__name__}:{entry} is not in {module.__name__}.py"
            )
        return found
    if callable(getattr(module, "handle", None)):
        return module.handle
    classes = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if c.__module__ == module.__name__ and _can_handle(c)
    ]
    # A base class of another one is no service of its own.
    classes = [c for c in classes if not any(o is not c and issubclass(o, c) for o in classes)]
    return classes[0] if len(classes) == 1 else None


def _can_handle(kind: type) -> bool:
    return hasattr(kind, "handle") or all(hasattr(kind, step) for step in STEPS)


class MMSService:
    def __init__(self, handler: Any, spec: Mapping[str, Any]) -> None:
        self._handler, self._spec = handler, spec
        self._what = getattr(handler, "__name__", "handle")
        if inspect.isclass(handler) and not _can_handle(handler):
            raise ArtifactError(f"the class {self._what} has no handle(data, context)")

    def load(self) -> None:
        context = ScriptContext(self._spec)
        if not inspect.isclass(self._handler):
            self._handle: Callable[[Any, Any], Any] = self._handler
            self._handle(None, context)  # a function is told to load with no data
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
        found: list[Answer | EngineError | None] = []
        readable: list[Request] = []
        data = []
        for request in requests:
            try:
                data.append(decoded(request))
            except InvalidRequest as error:  # is no matter of the others in its batch
                found.append(error)
            else:
                readable.append(request)
                found.append(None)
        handled = iter(self._ask(data, readable) if data else [])
        return [next(handled) if answer is None else answer for answer in found]

    def _ask(self, data: list[Any], requests: list[Request]) -> list[Answer | EngineError]:
        from mms.service import PredictionException

        context = ScriptContext(self._spec, requests)
        try:
            values = self._handle(data, context)
        except PredictionException as error:
            status = error.error_code if isinstance(error.error_code, int) else 500
            status = status if 400 <= status <= 599 else 500
            raise ScriptError(str(error.message), status, "PredictionException") from None
        return answers_of_batch(values, context, self._what)
