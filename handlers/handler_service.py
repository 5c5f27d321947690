"""The handler service that Multi Model Server starts for each model (`SAGEMAKER_HANDLER`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sagemaker_inference.default_handler_service import DefaultHandlerService

from common.errors import EngineError
from common.media_types import JSON
from common.settings import read_settings
from common.worker_protocol import PROBE_HEADER, WORKER_HEADER
from handlers.model_spec import ModelSpec
from handlers.payload import to_json
from handlers.settings import Settings
from handlers.transformer import ModelTransformer

logger = logging.getLogger(__name__)


class HandlerService(DefaultHandlerService):  # type: ignore[misc]
    """`initialize` loads the model and `handle` answers requests.

    Multi Model Server takes a load for good whatever `initialize` raises (mms/model_loader.py), so
    it raises nothing and keeps the outcome. A request with the probe's secret asks for it.
    """

    def __init__(self) -> None:
        super().__init__(transformer=ModelTransformer())
        self.load_error: EngineError | None = None
        self._secret = read_settings(Settings).probe_secret

    def initialize(self, context: Any) -> None:
        spec = ModelSpec.of(context)
        name = spec.name
        try:
            self._service.load(spec)
        except EngineError as error:
            self.load_error = error
            logger.error("model %s did not load: %s", name, error.message)
        except BaseException as error:  # SystemExit of a model's own script, too
            kind = type(error).__name__
            self.load_error = EngineError(f"the model's handler failed to load it ({kind})")
            logger.exception("model %s did not load", name)

    def handle(self, data: list[Mapping[str, Any]], context: Any) -> list[Any]:
        for i in range(len(data)):
            context.set_response_header(i, WORKER_HEADER, "1")
        headers = {str(k).lower(): v for k, v in context.get_all_request_header(0).items()}
        if self._secret and headers.get(PROBE_HEADER) == self._secret:
            context.set_response_content_type(0, JSON)
            return [to_json(self._outcome())]
        answers: list[Any] = self._service.transform(data, context, self.load_error)
        return answers

    def connected(self) -> None:
        """Multi Model Server has one more connection to the model."""
        self._service.connected()

    def disconnected(self) -> None:
        self._service.disconnected()

    def close(self) -> None:
        """Gives up what the model holds, in a process that goes on without it."""
        self._service.close()

    def _outcome(self) -> dict[str, Any]:
        if self.load_error is None:
            handler = self._service.handler
            outcome = {"status": 200, "in_engine": handler is not None and handler.IN_ENGINE}
            if self._service.metadata is not None:
                outcome["metadata"] = self._service.metadata
            return outcome
        body = self.load_error.to_body()
        return {"status": body["code"], "type": body["type"], "message": body["message"]}
