"""Writes MXNet's `.params` files; `engine.artifacts.read_params` has the format."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CODES = {"float32": 0, "float16": 2}


def write_params(
    path: Path,
    weights: Iterable[tuple[str, NDArray[Any]]],
    dtype: str,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Writes what `mx.nd.save` would, one array at a time, as `dtype` (float32 or float16).

    `progress` is called with bytes written.
    """
    names = []
    with path.open("wb") as file:
        file.write(struct.pack("<QQQ", 0x112, 0, 0))
        for name, w in weights:
            names.append(name.encode())
            file.write(struct.pack("<IiI", 0xF993FAC9, 0, w.ndim))
            file.write(struct.pack(f"<{w.ndim}q", *w.shape))
            file.write(struct.pack("<iii", 1, 0, CODES[dtype]))
            data = np.ascontiguousarray(w, dtype=dtype).data
            file.write(data)
            progress(data.nbytes)
        file.write(struct.pack("<Q", len(names)))
        for encoded in names:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.seek(16)
        file.write(struct.pack("<Q", len(names)))
