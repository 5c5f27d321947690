"""Writes `.safetensors`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file


def write_safetensors(
    path: Path,
    arrays: Iterable[tuple[str, NDArray[Any]]],
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """`arrays` may be mapped, and views in any order of strides: those are copied first.

    `progress` is called with bytes of what is ready to be written.
    """
    tensors, kept = {}, []
    for name, array in arrays:
        dtype = array.dtype.name.replace("void16", "bfloat16")  # its bytes, without ml_dtypes
        kept.append(data := np.ascontiguousarray(array))  # alive until it is written
        tensors[name] = TensorSpec(
            dtype=dtype, shape=list(array.shape), data_ptr=data.ctypes.data, data_len=data.nbytes
        )
        progress(data.nbytes)
    serialize_file(tensors, str(path), {"format": "pt"})
