"""Errors as responses, each in the shape of its contract."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.errors import PromptTooLong, ServiceError
from common.media_types import JSON
from serving.api import tgi
from serving.api.openai.errors import error_body
from serving.api.request import Request, Shape
from serving.errors import MethodNotAllowed, ServingError

logger = logging.getLogger(__name__)


def tgi_body(error: ServiceError) -> Mapping[str, Any]:
    return {**error.to_body(), **tgi.error_body(error)}


def v2_body(error: ServiceError) -> Mapping[str, Any]:
    return {"error": error.message}


def error_response(request: Request, error: Exception) -> Response:
    """Return an error in the format of the body's contract, or of the path's.

    An unexpected exception is logged, and its details are not sent.
    """
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # for the log only: the client has disconnected
    if not isinstance(error, ServiceError):
        fields = {"request_id": request.state.request_id}
        logger.error("a request failed", exc_info=error, extra={"fields": fields})
        error = ServingError("an error inside the server; the log has it under the request id")
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{math.ceil(max(error.retry_after_s, 1))}"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    shape = request.state.shape or _shape(request.scope["path"])
    # OpenAI's clients expect 400 for a prompt that is too long.
    is_400 = shape is error_body and isinstance(error, PromptTooLong)
    status = 400 if is_400 else error.status
    return Response(orjson.dumps(shape(error)), status, headers, media_type=JSON)


def _shape(path: str) -> Shape:
    if path.startswith("/v1/") or path in ("/tokenize", "/detokenize"):
        return error_body
    if path.startswith("/v2"):
        return v2_body
    return tgi_body if path in ("/generate", "/generate_stream") else ServiceError.to_body
