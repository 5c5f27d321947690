"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from typing import Any

from common.errors import PromptTooLong, ServiceError
from serving.errors import BadRequest, NotOfTheEngine, ServingError

CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
TOO_LONG = "context_length_exceeded"
# OpenAI's own messages, by which LiteLLM recognizes these errors.
WORDS = {
    "invalid_api_key": "Incorrect API key provided: ",
    TOO_LONG: "This model's maximum context length is exceeded: ",
}
# The engine's message about a field begins with the field's name.
FIELD = re.compile(r"(?:parameters\.)?(prompt|messages|logit_bias|bad_words_ids|min_new_tokens)\b")


class Refused(BadRequest):
    """A field is wrong, or requests a feature that is not supported."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(f"{param} {message}")
        self.param, self.code = param, code


class UnknownUrl(ServingError, status=404):
    """No such route."""

    code = "unknown_url"


def error_body(error: ServiceError) -> dict[str, Any]:
    # OpenAI's clients know 400 for a prompt that is too long.
    status = 400 if isinstance(error, PromptTooLong) else error.status
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    field = FIELD.match(error.message)
    param = field[1] if field else getattr(error, "field", "") or None
    if isinstance(error, NotOfTheEngine):
        param = "model"
    usual = TOO_LONG if isinstance(error, PromptTooLong) else CODES.get(status)
    code = getattr(error, "code", usual)
    fields = {
        "message": WORDS.get(code or "", "") + error.message.removeprefix("parameters."),
        "type": kind,
        "param": getattr(error, "param", param),
        "code": code,
    }
    return {"error": fields}
