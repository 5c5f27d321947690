"""Keys and values in int8: by what each channel of each layer is divided."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import onnx_session
from common.errors import InvalidRequest
from engine.artifacts.artifact import EMBEDDING, POSITIONS
from engine.artifacts.config import GPT2Config
from engine.artifacts.tensor_index import Weights

PRECISION = "int8-kv8"
SINCE = (1, 31)  # of onnxruntime: its GroupQueryAttention on the CPU reads int8 from then on
# Tokens drawn at random are looked at. What goes further beyond all of them is cut off, which costs
# more than the coarser steps do.
TOKENS = 512
MARGIN = 2
MAX = 127


def is_supported() -> bool:
    return tuple(int(part) for part in onnx_session.VERSION.split(".")[:2]) >= SINCE


def check() -> None:
    """Raises `InvalidRequest` where onnxruntime cannot compute it."""
    if not is_supported():
        raise InvalidRequest(
            f"precision {PRECISION} needs onnxruntime {'.'.join(map(str, SINCE))} or later, which"
            f" is for Python 3.11 and later; here is {onnx_session.VERSION}"
        )


def measured(
    graph: bytes, tensors: dict[str, NDArray[Any]], config: GPT2Config, weights: Weights
) -> NDArray[np.float32]:
    """The scales (buffers, 1, heads, 1, head size) of what a `graph` in fp32 with these tensors
    keeps; the buffers are a key and a value of each layer."""
    session = onnx_session.open_given(graph, tensors)
    length = min(TOKENS, config.max_length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length)
    x = weights[EMBEDDING][ids].astype(np.float32) + weights[POSITIONS][:length].astype(np.float32)
    given: dict[str, NDArray[Any]] = {
        "x": x[None],
        "seqlens_k": np.array([length - 1], np.int32),
        "total": np.array([length], np.int32),
    }
    for entry in session.get_inputs():
        if entry.name not in given:
            _, heads, _, size = entry.shape
            given[entry.name] = np.zeros((1, heads, length, size), np.float32)
    kept = [entry.name for entry in session.get_outputs() if entry.name.startswith("present_")]
    found = [np.abs(values).max(axis=2, keepdims=True) for values in session.run(kept, given)]
    scales: NDArray[np.float32] = np.stack(found) * np.float32(MARGIN / MAX)
    # What is always zero, as that which fills up a head, may be divided by anything else.
    return np.maximum(scales, np.float32(1e-6), out=scales)
