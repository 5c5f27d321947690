"""Reads `.safetensors` files with numpy alone, the arrays mapped from the file.

The package of that name copies each tensor and knows no bfloat16 in numpy. Format:
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.errors import ArtifactError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Name -> array. Raises `ArtifactError` for a file that is damaged or cut short."""
    try:
        if path.stat().st_size < 8:
            raise ArtifactError(f"{path.name} is not a safetensors file: it is too short")
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read: {error.strerror}") from None
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ArtifactError(f"{path.name} is not a safetensors file, or is cut short")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        if not isinstance(header, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError):
        raise ArtifactError(f"{path.name} is not a safetensors file: no JSON header") from None
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {name: _tensor(path, body, name, entry) for name, entry in header.items()}


def _tensor(path: Path, body: NDArray[np.uint8], name: str, entry: Any) -> NDArray[Any]:
    try:
        dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
        begin, end = entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
            raise ValueError("no natural number")
    except (TypeError, KeyError, ValueError):
        raise ArtifactError(f"{path.name}: what it says of {name} is damaged") from None
    if dtype is None:
        raise ArtifactError(f"{path.name}: {name} is of the unknown type {entry['dtype']}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ArtifactError(f"{path.name}: {name} does not have the length of its shape {shape}")
    if end > len(body):
        raise ArtifactError(f"{path.name} is cut short: {name} is not all there")
    try:
        return body[begin:end].view(dtype).reshape(shape)
    except ValueError:  # more dimensions than numpy has, or more numbers than it can count
        raise ArtifactError(f"{path.name}: {name} has no possible shape") from None
