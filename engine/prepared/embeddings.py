"""The embeddings of a prepared model: matrices in mapped files, of which rows are looked up."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.onnx import packing, quantize
from engine.prepared.files import Store

Floats = NDArray[np.float32]
Description = list[Any]  # its file, its type, its shape
CHUNK_ROWS = 1024

_mapped: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Table:
    """int8 in blocks (`onnx.quantize`), packed (`onnx.packing`), of `shape` (V, C)."""

    def __init__(self, data: NDArray[np.uint8], shape: Sequence[int]) -> None:
        rows, self._width = shape
        self._block = quantize.block_size(self._width)
        self._data = data[: packing.num_bytes(rows, self._width, self._block)]

    def __getitem__(self, ids: NDArray[Any]) -> Floats:
        """(T,) -> (T, C)"""
        blocks = -(-self._width // self._block)
        numbers, scales = packing.rows_of(self._data, ids, blocks, self._block)
        return quantize.dequantize(numbers, scales, self._width)


def open_table(folder: Path, name: str, dtype: str, shape: list[int]) -> Table | Floats:
    """What was added. Files of the same content are mapped once, wherever they are."""
    if dtype != "int8":
        return open_floats(folder, name, dtype, shape)
    found: Table = _mapped.get(name) or Table(np.memmap(folder / name, np.uint8, "r"), shape)
    _mapped[name] = found
    return found


def open_floats(folder: Path, name: str, dtype: str, shape: list[int]) -> Floats:
    found: Floats | None = _mapped.get(name)
    if found is None:
        found = _mapped[name] = np.memmap(folder / name, dtype, "r", shape=tuple(shape))
    return found


def add_floats(table: NDArray[Any], store: Store) -> Description:
    rows = range(0, len(table), CHUNK_ROWS)
    pieces = (np.ascontiguousarray(table[i : i + CHUNK_ROWS], np.float32) for i in rows)
    return [store.add(map(_bytes, pieces), ".bin"), "float32", table.shape]


def add_quantized(
    quantized: NDArray[np.uint8], scales: Floats, shape: tuple[int, ...], store: Store
) -> Description:
    """Of a table of `shape` (V, C), as `quantize.quantize` has it in blocks of its choice."""
    return [store.add(packing.packed(quantized, scales), ".bin"), "int8", shape]


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
