"""One model's functions, and running a batch of requests through them.

Stands in for the toolkit's own transformer where that sends tracebacks to clients and answers a
whole batch with the first request's headers (sagemaker-inference 1.10.1, transformer.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from sagemaker_inference.transformer import Transformer

from engine.errors import EngineError
from handlers.choose import Handler, choose
from handlers.request_id import request_id

logger = logging.getLogger(__name__)

# How many seconds the answer may take; the gateway sends it.
TIMEOUT_HEADER = "x-kogpt2-timeout"
# What the gateway cancels the request by when its client goes away.
REQUEST_HEADER = "x-kogpt2-request"


class ModelTransformer(Transformer):  # type: ignore[misc]
    """Answers `(data, context)` of Multi Model Server, one result per request of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.handler: Handler | None = None
        self._model: Any = None

    def load(self, model_dir: str, name: str) -> None:
        """Loads the model. Raises what `model_fn` raises."""
        self.handler = choose(model_dir)
        self._model = self.handler.model_fn(model_dir, name)

    def transform(
        self, data: list[Mapping[str, Any]], context: Any, failure: EngineError | None = None
    ) -> list[bytes]:
        """One answer per request; all of them `failure` where the model did not load."""
        return [self._answer(i, request, context, failure) for i, request in enumerate(data)]

    def _answer(
        self, i: int, request: Mapping[str, Any], context: Any, load_error: EngineError | None
    ) -> bytes:
        headers = {k.lower(): v for k, v in context.get_all_request_header(i).items()}
        content_type = _header(headers, "content-type")
        try:
            if load_error is not None or self.handler is None:
                raise load_error or EngineError("the model is not loaded")
            request_id.set(_header(headers, REQUEST_HEADER))
            body, kind = self.handler.transform_fn(
                self._model,
                request.get("body", b""),
                content_type,
                _header(headers, "accept"),
                float(_header(headers, TIMEOUT_HEADER) or 0) or None,
            )
        except Exception as error:
            failure = error
            if not isinstance(error, EngineError):
                logger.exception("request %s failed", headers.get("x-request-id", ""))
                failure = EngineError("the model's handler failed; the log says why")
            assert isinstance(failure, EngineError)
            context.set_response_status(failure.status, _phrase(failure), i)
            if failure.retry_after_s is not None:
                context.set_response_header(i, "retry-after", f"{failure.retry_after_s:.0f}")
            body = json.dumps(failure.to_body(), ensure_ascii=False).encode("utf-8")
            kind = "application/json"
        context.set_response_content_type(i, kind)
        return body


def _header(headers: Mapping[str, Any], name: str) -> str | None:
    """A request's header; a parameter of the same name hides it in a dict of its own."""
    value = headers.get(name)
    return value if isinstance(value, str) else None


def _phrase(error: EngineError) -> str:
    """A reason phrase in ASCII: Multi Model Server's worker dies of anything else."""
    return error.type
