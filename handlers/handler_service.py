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

    Multi Model Server reports a load as successful whatever `initialize` raises
    (mms/model_loader.py). So `initialize` raises nothing and stores the outcome, which the gateway
    reads with a probe: a request whose header has the probe's secret.
    """

    def __init__(self) -> None:
        settings = read_settings(Settings)
        super().__init__(transformer=ModelTransformer(settings))
        self.load_error: EngineError | None = None
        self._secret = settings.probe_secret

    def initialize(self, context: Any) -> None:
        spec = ModelSpec.of(context)
        try:
            self._service.load(spec)
        except EngineError as error:
            self.load_error = error
            logger.error("model %s did not load: %s", spec.name, error.message)
        except BaseException as error:  # also SystemExit of a model's own script
            kind = type(error).__name__
            self.load_error = EngineError(f"the model's handler failed to load it ({kind})")
            logger.exception("model %s did not load", spec.name)

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
        """Called when Multi Model Server has opened one more connection to the model."""
        if self._service.pool is not None:
            self._service.pool.connected()

    def disconnected(self) -> None:
        """Called when Multi Model Server has closed a connection to the model."""
        if self._service.pool is not None:
            self._service.pool.disconnected()

    def close(self) -> None:
        """Unloads the model while the process lives on."""
        self._service.close()

    def _outcome(self) -> dict[str, Any]:
        if self.load_error is not None:
            body = self.load_error.to_body()
            return {"status": body["code"], "type": body["type"], "message": body["message"]}
        outcome = {"status": 200, "in_engine": self._service.in_engine}
        if self._service.metadata is not None:
            outcome["metadata"] = self._service.metadata
        return outcome
