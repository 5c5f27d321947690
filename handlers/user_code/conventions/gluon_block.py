"""Default functions for a script whose `model_fn` returns a Gluon block.

As in the SageMaker MXNet serving container, the block is called with one NDArray:

https://github.com/aws/sagemaker-mxnet-inference-toolkit, default_inference_handler.py
"""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest
from common.mxnet_compat import mx
from handlers.tensors.symbol_module import computing, output_fn
from handlers.user_code.conventions import formats

__all__ = ["input_fn", "output_fn", "predict_fn"]  # as `.toolkit.Defaults` requires


def input_fn(body: bytes | str, content_type: str | None, model: Any) -> Any:
    """Decode a body to an NDArray of float32. Raises `InvalidRequest`, or `ScriptError` (415)."""
    values = formats.input_fn(body, content_type, model)
    if getattr(values, "dtype", None) is None or values.dtype.kind not in "biuf":
        raise InvalidRequest("the body must be numbers, in rows of one length")
    return mx.nd.array(values)


def predict_fn(data: Any, model: Any, timeout_s: float) -> Any:
    with computing():
        return model(data)
