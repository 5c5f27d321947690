"""The handler service that Multi Model Server starts for each model (`SAGEMAKER_HANDLER`).

It replaces the SageMaker Inference Toolkit's `DefaultHandlerService`, which sends tracebacks to
clients and answers a whole batch by the first request's headers (sagemaker-inference 1.10.1,
transformer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from common import worker_protocol as protocol
from common.errors import EngineError
from common.media_types import JSON
from common.settings import read_settings
from engine.http.client import ModelHandle
from handlers.dispatch import Handler, handler_for
from handlers.model_spec import ModelSpec
from handlers.payload import to_json
from handlers.request_id import request_id, token_counts
from handlers.settings import Settings
from handlers.user_code.entry_point import Script
from handlers.user_code.launch import launch
from handlers.user_code.messages import Answer, Part, Request, log_ids
from handlers.user_code.pool import ScriptPool

logger = logging.getLogger(__name__)

INTERNAL_HEADERS = (protocol.TIMEOUT_HEADER, protocol.REQUEST_HEADER, protocol.PROBE_HEADER)


class HandlerService:
    """Loads a model in `initialize` and answers requests in `handle`.

    Multi Model Server reports a load as successful whatever `initialize` raises
    (mms/model_loader.py). So `initialize` raises nothing and stores the outcome, which the gateway
    reads with a probe: a request whose header has the probe's secret.
    """

    def __init__(self) -> None:
        self._settings = read_settings(Settings)
        self.load_error: EngineError | None = None
        self.pool: ScriptPool | None = None  # of a model with its own script
        self._handler: Handler  # of any other model
        self._model: Any = None  # what the handler's `model_fn` returned

    def initialize(self, context: Any) -> None:
        spec = ModelSpec.of(context)
        try:
            self._load(spec)
        except EngineError as error:
            self.load_error = error
            logger.error("model %s did not load: %s", spec.name, error.message)
        except BaseException as error:  # also SystemExit of a model's own script
            kind = type(error).__name__
            self.load_error = EngineError(f"the model's handler failed to load it ({kind})")
            logger.exception("model %s did not load", spec.name)

    def _load(self, spec: ModelSpec) -> None:
        handler = handler_for(spec.path, spec.handler)
        if isinstance(handler, Script):
            self.pool = launch(handler, spec, self._settings)
            return
        # The gateway refuses engine options for any other model.
        options = spec.engine if handler.IN_ENGINE else {}
        self._handler = handler
        self._model = handler.model_fn(spec.path, spec.engine_name, **options)

    def handle(self, data: list[Mapping[str, Any]], context: Any) -> list[bytes]:
        """Return one answer per request of a batch; each is `load_error` if the load failed."""
        for i in range(len(data)):
            context.set_response_header(i, protocol.WORKER_HEADER, "1")
        headers = {str(k).lower(): v for k, v in context.get_all_request_header(0).items()}
        secret = self._settings.probe_secret
        if secret and headers.get(protocol.PROBE_HEADER) == secret:
            context.set_response_content_type(0, JSON)
            return [to_json(self._outcome())]
        batch = [_request(i, values, context) for i, values in enumerate(data)]
        requests = [request for request, _ in batch]
        timeouts_s = (timeout_s for _, timeout_s in batch if timeout_s)
        timeout_s = max(timeouts_s, default=self._settings.request_timeout_s)
        try:
            answers = self._answers(requests, timeout_s)
        except Exception as error:
            answers = [_to_engine_error(error, requests)] * len(requests)
        return [_respond(i, answer, context) for i, answer in enumerate(answers)]

    def _answers(
        self, requests: Sequence[Request], timeout_s: float
    ) -> Sequence[Answer | EngineError]:
        if self.load_error is not None:
            raise self.load_error
        if self.pool is not None:
            return self.pool.answer(requests, timeout_s)
        return [self._answer(request, timeout_s) for request in requests]

    def _answer(self, request: Request, timeout_s: float) -> Answer | EngineError:
        request_id.set(request.id)
        token_counts.set(None)
        content_type, accept = request.headers.get("content-type"), request.headers.get("accept")
        try:
            answer = Answer(
                *self._handler.transform_fn(
                    self._model, request.body, content_type, accept, timeout_s
                )
            )
        except Exception as error:  # must not fail the rest of the batch
            return _to_engine_error(error, [request])
        if (counts := token_counts.get()) is not None:
            answer.headers[protocol.TOKENS_HEADER] = f"{counts[0]} {counts[1]}"
        return answer

    def connected(self) -> None:
        """Called when Multi Model Server has opened another connection to the model."""
        if self.pool is not None:
            self.pool.connected()

    def disconnected(self) -> None:
        """Called when Multi Model Server has closed a connection to the model."""
        if self.pool is not None:
            self.pool.disconnected()

    def close(self) -> None:
        """Unload the model; the process continues to run."""
        if isinstance(self._model, ModelHandle):
            self._model.close()

    def _outcome(self) -> dict[str, Any]:
        """Return the outcome of the load.

        `in_engine`: the gateway may stream from the engine. False for a script, even if it uses a
        model in the engine: a stream would bypass the script's own functions.
        `whole_because`: why a model that was loaded with a base shares nothing with it, or ""
        """
        if self.load_error is not None:
            body = self.load_error.to_body()
            return {"status": body["code"], "type": body["type"], "message": body["message"]}
        if self.pool is not None:
            return {"status": 200, "in_engine": False}
        metadata = self._handler.describe(self._model)
        outcome = {"status": 200, "in_engine": self._handler.IN_ENGINE, "metadata": metadata}
        if isinstance(self._model, ModelHandle):
            outcome["whole_because"] = self._model.model.get("whole_because", "")
        return outcome


def _request(i: int, values: Mapping[str, Any], context: Any) -> tuple[Request, float]:
    """Read request `i` of a batch, and its timeout in seconds; 0 if the gateway sent none."""
    headers, content_types = {}, {}
    for name, value in context.get_all_request_header(i).items():
        if isinstance(value, str):
            headers[str(name).lower()] = value
        else:  # headers of a part, under the part's name
            content_types[str(name)] = str(value.get("content-type", ""))
    timeout_s = float(headers.get(protocol.TIMEOUT_HEADER, 0))
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
    ids = log_ids(requests)
    logger.error("request %s failed", ids, exc_info=error, extra={"fields": {"request_id": ids}})
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
