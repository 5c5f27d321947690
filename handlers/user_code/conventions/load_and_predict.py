"""Runs scripts with `load_model(model_dir)` and `predict(model, payload)`.

`payload` is the batch in Multi Model Server's form: a list of one dict per request, whose body is
bytes, `payload[0]["body"]`. `predict` returns a list with one answer per request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from common.errors import ArtifactError, EngineError
from handlers.user_code.conventions.mms_context import ScriptContext, to_answer
from handlers.user_code.messages import Answer, Request, ScriptError


class LoadAndPredict:
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
        return answers_of_batch(values, ScriptContext(self._spec, requests), "predict")


def answers_of_batch(values: Any, context: ScriptContext, what: str) -> list[Answer | EngineError]:
    """Converts a script's list of results, one per request. Raises `ScriptError` for others."""
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
