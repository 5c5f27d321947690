"""One model's functions, and running a batch of requests through them.

Stands in for the toolkit's own transformer where that sends tracebacks to clients and answers a
whole batch with the first request's headers (sagemaker-inference 1.10.1, transformer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sagemaker_inference.transformer import Transformer

from common.errors import EngineError
from common.media_types import JSON
from common.worker_protocol import (
    PROBE_HEADER,
    REQUEST_HEADER,
    REQUEST_ID,
    TIMEOUT_HEADER,
    TOKENS_HEADER,
)
from engine.http.client import ModelHandle
from handlers.dispatch import Handler, handler_for
from handlers.model_spec import ModelSpec
from handlers.payload import to_json
from handlers.request_id import request_id, token_counts
from handlers.user_code.handler import ScriptHandler
from handlers.user_code.messages import Answer, Part, Request

logger = logging.getLogger(__name__)

INTERNAL_HEADERS = (TIMEOUT_HEADER, REQUEST_HEADER, PROBE_HEADER)


class ModelTransformer(Transformer):  # type: ignore[misc]
    """Answers `(data, context)` of Multi Model Server, one result per request of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.handler: Handler | ScriptHandler | None = None
        self.metadata: dict[str, Any] | None = None  # what /v2 tells of the model
        self._model: Any = None  # a built-in handler's
        self._answer: Callable[[Sequence[Request], float | None], Sequence[Answer | EngineError]]

    def load(self, spec: ModelSpec) -> None:
        """Loads the model. Raises what its handler raises."""
        handler = handler_for(spec.path, spec.handler)
        if isinstance(handler, ScriptHandler):
            handler.load(spec)
            self._answer = handler.answer
        else:
            # What is for the engine is for no other: the gateway refuses it for them.
            options = spec.engine if handler.IN_ENGINE else {}
            model = handler.model_fn(spec.path, spec.engine_name, **options)
            self._model = model
            self._answer = _one_by_one(handler, model)
            if hasattr(handler, "describe"):
                self.metadata = handler.describe(model)
        self.handler = handler

    def connected(self) -> None:
        if isinstance(self.handler, ScriptHandler):
            self.handler.connected()

    def disconnected(self) -> None:
        if isinstance(self.handler, ScriptHandler):
            self.handler.disconnected()

    def close(self) -> None:
        if isinstance(self._model, ModelHandle):
            self._model.close()

    def transform(
        self, data: list[Mapping[str, Any]], context: Any, failure: EngineError | None = None
    ) -> list[bytes]:
        """One answer per request; all of them `failure` where the model did not load."""
        requests, limits = [], []
        for i, values in enumerate(data):
            request, limit_s = _request(i, values, context)
            requests.append(request)
            limits.append(limit_s)
        try:
            if failure is not None or self.handler is None:
                raise failure or EngineError("the model is not loaded")
            answers = self._answer(requests, max(filter(None, limits), default=None))
        except Exception as error:
            answers = [_explained(error, requests)] * len(requests)
        return [_respond(i, answer, context) for i, answer in enumerate(answers)]


def _one_by_one(
    handler: Handler, model: Any
) -> Callable[[Sequence[Request], float | None], list[Answer | EngineError]]:
    """A handler that knows no batches."""

    def answer(request: Request, timeout_s: float | None) -> Answer | EngineError:
        headers = request.headers
        request_id.set(request.id)
        token_counts.set(None)
        try:
            answer = Answer(
                *handler.transform_fn(
                    model,
                    request.body,
                    headers.get("content-type"),
                    headers.get("accept"),
                    timeout_s,
                )
            )
            if (counts := token_counts.get()) is not None:
                answer.headers[TOKENS_HEADER] = f"{counts[0]} {counts[1]}"
            return answer
        except Exception as error:
            return _explained(error, [request])

    return lambda requests, timeout_s: [answer(request, timeout_s) for request in requests]


def _request(i: int, values: Mapping[str, Any], context: Any) -> tuple[Request, float | None]:
    """The `i`-th of a batch, and how many seconds it has, if the gateway said so."""
    headers, kinds = {}, {}
    for name, value in context.get_all_request_header(i).items():
        if isinstance(value, str):
            headers[str(name).lower()] = value
        else:  # of a part; one called like a header hides it
            kinds[str(name)] = str(value.get("content-type", ""))
    limit_s = float(headers.get(TIMEOUT_HEADER, 0)) or None
    id = headers.get(REQUEST_HEADER) or str(context.get_request_id(i))
    for name in INTERNAL_HEADERS:
        headers.pop(name, None)
    parts = [Part(name, kinds.get(name, ""), bytes(value)) for name, value in values.items()]
    return Request(id, headers, parts), limit_s


def _explained(error: Exception, requests: Sequence[Request]) -> EngineError:
    if isinstance(error, EngineError):
        return error
    ids = ", ".join(request.headers.get(REQUEST_ID, "") for request in requests)
    logger.error("request %s failed", ids, exc_info=error)
    return EngineError("the model's handler failed; the log says why")


def _respond(i: int, answer: Answer | EngineError, context: Any) -> bytes:
    if isinstance(answer, EngineError):
        context.set_response_status(answer.status, "", i)
        if answer.retry_after_s is not None:
            context.set_response_header(i, "retry-after", f"{answer.retry_after_s:.0f}")
        context.set_response_content_type(i, JSON)
        return to_json(answer.to_body())
    if answer.status != 200:
        context.set_response_status(answer.status, "", i)
    for name, value in answer.headers.items():
        context.set_response_header(i, name, value)
    context.set_response_content_type(i, answer.content_type)
    return answer.body
