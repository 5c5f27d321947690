"""The handler service that Multi Model Server starts for each model (`SAGEMAKER_HANDLER`)."""

from __future__ import annotations

import logging
from typing import Any

from sagemaker_inference.default_handler_service import DefaultHandlerService

from engine.errors import EngineError
from handlers.transformer import ModelTransformer

logger = logging.getLogger(__name__)


class HandlerService(DefaultHandlerService):  # type: ignore[misc]
    """`initialize` loads the model and `handle` answers requests.

    Multi Model Server takes a load for good whatever `initialize` raises (mms/model_loader.py), so
    it raises nothing and keeps the outcome in `load_error`; `handlers.worker` looks there.
    """

    def __init__(self) -> None:
        super().__init__(transformer=ModelTransformer())
        self.load_error: EngineError | None = None

    def initialize(self, context: Any) -> None:
        model_dir = context.system_properties["model_dir"]
        try:
            self._service.validate_and_initialize(model_dir=model_dir, context=context)
        except EngineError as error:
            self.load_error = error
            logger.error("model %s did not load: %s", context.model_name, error.message)
        except MemoryError:
            self.load_error = EngineError("the worker has no memory left")
            logger.exception("model %s did not load", context.model_name)
        except Exception:
            self.load_error = EngineError("the model's handler failed to load it; the log says why")
            logger.exception("model %s did not load", context.model_name)
