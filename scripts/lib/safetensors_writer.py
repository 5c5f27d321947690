"""Writes `.safetensors`, one array at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "void16": "BF16",  # its bytes, where ml_dtypes is not there
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
ALIGNMENT = 64


def write_safetensors(
    path: Path,
    arrays: Iterable[tuple[str, NDArray[Any]]],
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """`arrays` are written in their order; they may be mapped, and views in any order of strides.

    `progress` is called with bytes written.
    """
    named = list(arrays)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in named:
        end = at + array.nbytes
        code = CODES[array.dtype.name]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # the numbers begin aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in named:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            progress(array.nbytes)
