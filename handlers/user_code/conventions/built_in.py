"""The built-in handlers as defaults of a script without a `model_fn`.

Such a script changes the input or output of a model that the server can run by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.errors import ArtifactError
from common.json_body import read_json, read_text
from common.media_types import JSON, TEXT
from handlers.dispatch import Handler, built_in
from handlers.payload import to_json
from handlers.user_code.conventions import formats
from handlers.user_code.messages import ScriptError, unsupported
from handlers.user_code.module import server_imports


class BuiltIn:
    """The toolkit's functions around a built-in handler.

    `input_fn` returns the JSON value or text of the body; `predict_fn` takes it (a text as
    `{"inputs": text}`) and returns the handler's JSON answer as a value.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        with server_imports():
            self.handler: Handler = built_in(spec["root"])

    def load(self, *, for_script: bool) -> Any:
        """Load the model as a script's functions, or `handler`, take it. Raises `EngineError`."""
        handler = getattr(self.handler, "FOR_SCRIPTS", self.handler) if for_script else self.handler
        try:
            with server_imports():
                if self.handler.IN_ENGINE:
                    from handlers.user_code.engine_proxy import EngineModel

                    return EngineModel(self._spec["engine"])
                return handler.model_fn(self._spec["root"], self._spec["engine_name"])
        except ArtifactError as error:
            raise ArtifactError(
                "Please provide a model_fn implementation (or load_model and predict, or"
                " handle(data, context), or one class with initialize and handle): the script has"
                f" none, and the server cannot run its model without it ({error.message})"
            ) from None

    def input_fn(self, body: bytes | str, content_type: str | None, model: Any) -> Any:
        """Parse JSON or text. Raises `InvalidRequest`, or `ScriptError` with status 415."""
        kind = (content_type or JSON).split(";")[0].strip()
        if kind == JSON:
            return read_json(body)
        if kind == TEXT:
            return read_text(body)
        raise unsupported(f"Content type {content_type} is not supported, {JSON} and {TEXT} are")

    def predict_fn(self, data: Any, model: Any, timeout_s: float) -> Any:
        """Answer with the built-in handler. Raises `EngineError`."""
        value = {"inputs": data} if isinstance(data, str) else data
        try:
            body = to_json(value)
        except (TypeError, ValueError) as error:
            raise ScriptError(
                f"input_fn returned {type(data).__name__}, must be a JSON value: {error}"
            ) from None
        answer, kind = self.handler.transform_fn(model, body, JSON, JSON, timeout_s)
        return json.loads(answer) if kind.startswith(JSON) else answer

    def output_fn(self, prediction: Any, accept: str) -> Any:
        if isinstance(prediction, str) and accept.split(";")[0] == TEXT:
            return prediction, f"{TEXT}; charset=utf-8"
        if accept.split(",")[0].split(";")[0].strip() == JSON:
            return json.dumps(prediction, ensure_ascii=False), JSON
        return formats.output_fn(prediction, accept)
