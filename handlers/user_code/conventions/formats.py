"""The toolkit's default functions: arrays in JSON, CSV, NPY and sparse NPZ.

They use its decoders and encoders, and report a client's mistake as a 4xx with the reason.
"""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest
from handlers.user_code.messages import ScriptError, unsupported


def input_fn(body: bytes | str, content_type: str | None, model: Any) -> Any:
    """Decode a body to a numpy array, or NPZ to a scipy sparse matrix.

    Raises `InvalidRequest`, or `ScriptError` with status 415.
    """
    from sagemaker_inference import decoder, errors

    try:
        return decoder.decode(body, content_type)
    except errors.UnsupportedFormatError:
        known = ", ".join(sorted(decoder._decoder_map))
        message = f"Content type {content_type} is not supported, {known} are"
        raise unsupported(message) from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidRequest(f"the body is not {content_type}: {reason}") from None


def predict_fn(data: Any, model: Any, timeout_s: float) -> Any:
    """Never called: a script with such a model must define `predict_fn`, or it is not loaded."""
    raise NotImplementedError


def output_fn(prediction: Any, accept: str) -> tuple[Any, str]:
    """Encode a prediction by Accept. Raises `ScriptError`: 406, or 500 if that is impossible."""
    from sagemaker_inference import encoder, utils

    for content_type in utils.parse_accept(accept):
        kind = content_type.split(";")[0]
        kind = "application/json" if kind in ("*/*", "application/*") else kind
        if kind not in encoder.SUPPORTED_CONTENT_TYPES:
            continue
        try:
            return encoder.encode(prediction, kind), kind
        except (TypeError, ValueError) as error:
            name = type(prediction).__name__
            raise ScriptError(f"predict_fn's {name} cannot be written as {kind}: {error}") from None
    known = ", ".join(sorted(encoder.SUPPORTED_CONTENT_TYPES))
    raise unsupported(f"Content type {accept} is not supported, {known} are", 406)
