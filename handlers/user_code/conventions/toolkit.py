"""Runs scripts with the SageMaker Inference Toolkit's functions as its version 1.10.1 does:

    model = model_fn(model_dir)                         after pre_model_fn, before model_warmup_fn
    transform_fn(model, body, content_type, accept)     or, instead of it,
    output_fn(predict_fn(input_fn(body, content_type), model), accept)

each with the context as one more argument if it takes one (`input_fn` also: the `model`). A missing
function is the toolkit's default, or the MXNet container's for an MXNet model
(`defaults_for`). Without `model_fn` it is the built-in handler's for the
model's files; without any function that handler answers alone.

Intended differences: each request of a batch has its own headers, an error has a reason and no
traceback, a client's mistake is a 4xx, and NPY is read without pickle.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from common.errors import ArtifactError, EngineError, InvalidRequest
from common.media_types import JSON
from handlers.dispatch import Handler
from handlers.request_id import request_id
from handlers.user_code.conventions import formats
from handlers.user_code.conventions.built_in import BuiltIn
from handlers.user_code.conventions.mms_context import ScriptContext, to_answer
from handlers.user_code.failures import to_script_error
from handlers.user_code.messages import Answer, Request, ScriptError, unsupported
from handlers.user_code.module import server_imports

STAGES = ("input_fn", "predict_fn", "output_fn")
FUNCTIONS = ("model_fn", "transform_fn", *STAGES)
ARGUMENTS = {
    "pre_model_fn": 1, "model_fn": 1, "model_warmup_fn": 2, "transform_fn": 4, "input_fn": 2,
    "predict_fn": 2, "output_fn": 2,
}  # fmt: skip
UTF8_TYPES = (JSON, "text/csv")


class Defaults(Protocol):
    """Default functions for a script. They raise `EngineError` for its or the client's mistakes."""

    def input_fn(self, body: bytes | str, content_type: str | None, model: Any) -> Any: ...

    def predict_fn(self, data: Any, model: Any, timeout_s: float) -> Any: ...

    def output_fn(self, prediction: Any, accept: str) -> Any:
        """Return the body, or body and content type."""


def defaults_for(model: Any, fallback: Defaults) -> Defaults:
    """Return the SageMaker MXNet container's defaults for an MXNet model, else `fallback`."""
    mxnet = sys.modules.get("mxnet")  # imported by the script if the model is MXNet's
    with server_imports():
        if mxnet is not None and isinstance(model, mxnet.mod.BaseModule):
            from handlers.tensors import symbol_module

            return symbol_module
        if mxnet is not None and isinstance(model, mxnet.gluon.Block):
            from handlers.user_code.conventions import gluon_block

            return gluon_block
    return fallback


class SageMakerFunctions:
    """A script with the toolkit's functions. Raises `ArtifactError` for an invalid combination."""

    def __init__(self, module: ModuleType, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._functions: dict[str, Callable[..., Any]] = {
            name: getattr(module, name)
            for name in ARGUMENTS
            if callable(getattr(module, name, None))
        }
        self._accept = os.environ.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT") or JSON
        if "transform_fn" in self._functions and any(name in self._functions for name in STAGES):
            raise ArtifactError(
                "Cannot use transform_fn implementation in conjunction with input_fn, predict_fn,"
                " and/or output_fn implementation"
            )
        for name, function in self._functions.items():
            _check_arguments(name, function)
        self._defaults: Defaults = formats
        self._handler: Handler | None = None  # answers for a script without functions

    def load(self) -> None:
        model_dir, context = self._spec["root"], ScriptContext(self._spec)
        if "pre_model_fn" in self._functions:
            self._call("pre_model_fn", (model_dir,), context)
        if "model_fn" in self._functions:
            self._model = self._call("model_fn", (model_dir,), context)
            self._defaults = defaults_for(self._model, formats)
            if self._defaults is formats and not {"transform_fn", "predict_fn"} & set(
                self._functions
            ):
                raise ArtifactError("Please provide a predict_fn implementation (or transform_fn)")
        else:
            built_in = BuiltIn(self._spec)
            has_functions = not set(self._functions) <= {"pre_model_fn"}
            self._model = built_in.load(for_script=has_functions)
            self._handler = None if has_functions else built_in.handler
            self._defaults = defaults_for(self._model, built_in)
        if "model_warmup_fn" in self._functions:
            self._call("model_warmup_fn", (model_dir, self._model), context)

    def answer(self, requests: list[Request], timeout_s: float) -> Sequence[Answer | EngineError]:
        end = time.monotonic() + timeout_s
        return [self._answer(request, end - time.monotonic()) for request in requests]

    def _answer(self, request: Request, timeout_s: float) -> Answer | EngineError:
        request_id.set(request.id)  # the engine cancels by it if the built-in model answers
        try:
            return self._transform(request, timeout_s)
        except BaseException as error:  # must not fail the rest of the batch
            return to_script_error(error, [request])

    def _transform(self, request: Request, timeout_s: float) -> Answer:
        headers = request.headers
        if self._handler is not None:
            content_type, accept = headers.get("content-type"), headers.get("accept")
            return Answer(
                *self._handler.transform_fn(
                    self._model, request.body, content_type, accept, timeout_s
                )
            )
        context = ScriptContext(self._spec, [request])
        accept = headers.get("accept", "")
        accept = self._accept if accept in ("", "*/*") else accept
        body, content_type = _decoded(request)
        if "transform_fn" in self._functions:
            arguments = (self._model, body, content_type, accept)
            result, what = self._call("transform_fn", arguments, context), "transform_fn"
        else:
            result, what = self._stages(body, content_type, accept, context, timeout_s), "output_fn"
        kind = accept if "," not in accept else None
        if isinstance(result, tuple):
            if len(result) != 2:
                raise ScriptError(
                    f"{what} returned a tuple of {len(result)}, must return the body, or body and"
                    " content type"
                )
            result, kind = result
        return to_answer(result, kind, context.request_processor[0], what)

    def _stages(
        self, body: Any, content_type: str | None, accept: str, context: Any, timeout_s: float
    ) -> Any:
        def run(name: str, arguments: tuple[Any, ...], *of_default: Any) -> Any:
            if name in self._functions:
                return self._call(name, arguments, context)
            return getattr(self._defaults, name)(*arguments, *of_default)

        data = run("input_fn", (body, content_type), self._model)
        prediction = run("predict_fn", (data, self._model), timeout_s)
        return run("output_fn", (prediction, accept))

    def _call(self, name: str, arguments: tuple[Any, ...], context: ScriptContext) -> Any:
        function = self._functions[name]
        parameters = list(inspect.signature(function).parameters)
        if len(parameters) == len(arguments) + 1:
            # As in the MXNet container, an `input_fn` may take the model instead.
            wants_model = name == "input_fn" and parameters[-1] == "model"
            arguments = (*arguments, self._model if wants_model else context)
        try:
            return function(*arguments)
        except (EngineError, MemoryError, SystemExit):
            raise
        except Exception as error:
            toolkit = _toolkit_error(error, name)
            if toolkit is None:
                raise
            raise toolkit from error


def _toolkit_error(error: Exception, name: str) -> ScriptError | None:
    """Convert an error of the toolkit's own classes to a `ScriptError`; None for other errors."""
    errors = sys.modules.get("sagemaker_inference.errors")  # imported if the error is from it
    if errors is None:
        return None
    if isinstance(error, errors.BaseInferenceToolkitError):
        return ScriptError(str(error.message), int(error.status_code), type(error).__name__)
    if isinstance(error, errors.UnsupportedFormatError):
        status = 406 if name == "output_fn" else 415
        return unsupported(str(error).split(".")[0] + ".", status)
    return None


def _check_arguments(name: str, function: Callable[..., Any]) -> None:
    """Check a function's number of arguments by the toolkit's rules, when the model loads."""
    wanted = ARGUMENTS[name]
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY) for p in parameters):
        return
    if len(parameters) not in (wanted, wanted + 1):
        raise ArtifactError(
            f"{name} takes {len(parameters)} arguments, must take {wanted}, or the context as one"
            " more"
        )


def _decoded(request: Request) -> tuple[bytes | str, str]:
    """Return the body, decoded if it is JSON or CSV, and the content type without the charset.

    The default content type is JSON, as for the built-in handlers. Raises `InvalidRequest`, or
    `ScriptError` for an unknown charset.
    """
    content_type = request.headers.get("content-type", JSON)
    kind, *options = content_type.split(";")
    kind = kind.strip()
    if kind not in UTF8_TYPES:
        return request.body, content_type
    charset = "utf-8"
    rest = []
    for option in options:
        name, _, value = option.strip().partition("=")
        if name.lower() == "charset":
            charset = value.strip('" ')
        else:
            rest.append(option.strip())
    try:
        return request.body.decode(charset), "; ".join([kind, *rest])
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"the body is not {charset}, the charset of its Content-Type"
        ) from None
    except LookupError:
        raise unsupported(f"the charset {charset[:40]} is not known") from None
