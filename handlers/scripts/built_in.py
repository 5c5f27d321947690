"""The built-in handler as the defaults of a script without a `model_fn`.

Such a script changes what goes in or comes out of a model that the server can run by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ArtifactError, InvalidRequest
from handlers.choose import built_in
from handlers.scripts import formats
from handlers.scripts.messages import ScriptError

JSON = "application/json"


class BuiltIn:
    """The toolkit's three functions around a built-in handler.

    Where the handler has them itself, they are its own. Else: `input_fn` gives the JSON value or
    the text of the body, `predict_fn` takes such a value (text alone is `{"inputs": text}`) and
    gives the handler's JSON answer as a value.
    """

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._orders = orders
        handler = built_in(orders["root"])
        self._handler: Any = getattr(handler, "FOR_SCRIPTS", handler)
        self._model: Any = None

    def load(self) -> Any:
        """Raises `EngineError`."""
        try:
            self._model = self._handler.model_fn(self._orders["root"], self._orders["engine_name"])
        except ArtifactError as error:
            raise ArtifactError(
                "Please provide a model_fn implementation: the script has none, and its model is"
                f" none that the server can run by itself ({error.message})"
            ) from None
        return self._model

    def input_fn(self, body: bytes | str, content_type: str | None) -> Any:
        """Raises `InvalidRequest`, or 415."""
        if (own := getattr(self._handler, "input_fn", None)) is not None:
            return own(body, content_type, self._model)
        try:
            text = body if isinstance(body, str) else body.decode("utf-8")
            kind = (content_type or JSON).split(";")[0].strip()
            if kind == JSON:
                return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}") from None
        if kind == "text/plain":
            return text
        raise ScriptError(
            f"Content type {content_type} is not supported, {JSON} and text/plain are",
            415,
            "UnsupportedFormatError",
        )

    def predict_fn(self, data: Any, model: Any, timeout_s: float) -> Any:
        """Raises `EngineError`."""
        if (own := getattr(self._handler, "predict_fn", None)) is not None:
            return own(data, model)
        value = {"inputs": data} if isinstance(data, str) else data
        try:
            body = json.dumps(value).encode()
        except (TypeError, ValueError) as error:
            raise ScriptError(f"input_fn gave what is no JSON value: {error}") from None
        answer, kind = self._handler.transform_fn(model, body, JSON, JSON, timeout_s)
        return json.loads(answer) if kind.startswith(JSON) else answer

    def output_fn(self, prediction: Any, accept: str) -> Any:
        if (own := getattr(self._handler, "output_fn", None)) is not None:
            return own(prediction, accept)
        if isinstance(prediction, str) and accept.split(";")[0] == "text/plain":
            return prediction, "text/plain; charset=utf-8"
        if accept.split(",")[0].split(";")[0].strip() == JSON:
            return json.dumps(prediction, ensure_ascii=False), JSON
        return formats.output_fn(prediction, accept)
