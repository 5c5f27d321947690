"""Loads one model's handler and passes batches of requests to it.

Replaces the SageMaker Inference Toolkit's `Transformer`, which sends tracebacks to clients and
answers a whole batch by the first request's headers (sagemaker-inference 1.10.1, transformer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sagemaker_inference.transformer import Transformer

from common import worker_protocol as protocol
from common.errors import EngineError
from common.media_types import JSON
from engine.http.client import ModelHandle
from handlers.dispatch import Handler, handler_for
from handlers.model_spec import ModelSpec
from handlers.payload import to_json
from handlers.request_id import request_id, token_counts
from handlers.settings import Settings
from handlers.user_code.entry_point import Script
from handlers.user_code.launch import launch
from handlers.user_code.messages import Answer, Part, Request
from handlers.user_code.pool import ScriptPool

logger = logging.getLogger(__name__)

INTERNAL_HEADERS = (protocol.TIMEOUT_HEADER, protocol.REQUEST_HEADER, protocol.PROBE_HEADER)


class ModelTransformer(Transformer):  # type: ignore[misc]
    """Answers `(data, context)` of Multi Model Server, one result per request of the batch."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self.pool: ScriptPool | None = None  # of a model with its own script
        self.metadata: dict[str, Any] | None = None  # the answer of `GET /v2/models/{name}`
        # Whether the gateway may stream from the engine. False for a script, also if it uses a
        # model in the engine: a stream would bypass the script's own functions.
        self.in_engine = False
        self._model: Any = None  # what the built-in handler's `model_fn` returned
        self._answer: Callable[[Sequence[Request], float | None], Sequence[Answer | EngineError]]

    def load(self, spec: ModelSpec) -> None:
        """Loads the model. Raises what its handler raises."""
        handler = handler_for(spec.path, spec.handler)
        if isinstance(handler, Script):
            pool = self.pool = launch(handler, spec, self._settings)
            default_s = self._settings.request_timeout_s
            self._answer = lambda requests, timeout_s: pool.answer(requests, timeout_s or default_s)
            return
        # The gateway refuses engine options for any other model.
        options = spec.engine if handler.IN_ENGINE else {}
        model = self._model = handler.model_fn(spec.path, spec.engine_name, **options)
        self._answer = lambda requests, timeout_s: [
            _answer(handler, model, request, timeout_s) for request in requests
        ]
        if hasattr(handler, "describe"):
            self.metadata = handler.describe(model)
        self.in_engine = handler.IN_ENGINE

    def close(self) -> None:
        if isinstance(self._model, ModelHandle):
            self._model.close()

    def transform(
        self, data: list[Mapping[str, Any]], context: Any, load_error: EngineError | None = None
    ) -> list[bytes]:
        """One answer per request: `load_error` for each if the model did not load."""
        requests = [_request(i, values, context) for i, values in enumerate(data)]
        timeouts_s = [timeout_s for _, timeout_s in requests if timeout_s]
        batch = [request for request, _ in requests]
        try:
            if load_error is not None:
                raise load_error
            answers = self._answer(batch, max(timeouts_s, default=None))
        except Exception as error:
            answers = [_to_engine_error(error, batch)] * len(batch)
        return [_respond(i, answer, context) for i, answer in enumerate(answers)]


def _answer(
    handler: Handler, model: Any, request: Request, timeout_s: float | None
) -> Answer | EngineError:
    request_id.set(request.id)
    token_counts.set(None)
    content_type, accept = request.headers.get("content-type"), request.headers.get("accept")
    try:
        answer = Answer(*handler.transform_fn(model, request.body, content_type, accept, timeout_s))
        if (counts := token_counts.get()) is not None:
            answer.headers[protocol.TOKENS_HEADER] = f"{counts[0]} {counts[1]}"
        return answer
    except Exception as error:
        return _to_engine_error(error, [request])


def _request(i: int, values: Mapping[str, Any], context: Any) -> tuple[Request, float | None]:
    """Request `i` of a batch, and its timeout in seconds if the gateway sent one."""
    headers, content_types = {}, {}
    for name, value in context.get_all_request_header(i).items():
        if isinstance(value, str):
            headers[str(name).lower()] = value
        else:  # headers of a part, under the part's name
            content_types[str(name)] = str(value.get("content-type", ""))
    timeout_s = float(headers.get(protocol.TIMEOUT_HEADER, 0)) or None
    id = headers.get(protocol.REQUEST_HEADER) or str(context.get_request_id(i))
    for name in INTERNAL_HEADERS:
        headers.pop(name, None)
    parts = [
        Part(name, content_types.get(name, ""), bytes(value)) for name, value in values.items()
    ]
    return Request(id, headers, parts), timeout_s


def _to_engine_error(error: Exception, requests: Sequence[Request]) -> EngineError:
    if isinstance(error, EngineError):
        return error
    ids = ", ".join(request.headers.get(protocol.REQUEST_ID, "") for request in requests)
    logger.error("request %s failed", ids, exc_info=error)
    return EngineError("the model's handler failed; the log has the reason")


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
