"""The K/V cache of a batch in MXNet's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from common.errors import OutOfMemory
from common.memory import is_out_of_memory
from common.mxnet_compat import mx
from engine.artifacts.config import GPT2Config
from engine.backends.dense import DenseCache

nd = mx.nd


class MXNetKVCache(DenseCache):
    """Two arrays (rows, heads, capacity, hs) a layer, masked beyond the length of each row."""

    shape = (0, 0)

    def __init__(self, config: GPT2Config, ctx: Any):
        super().__init__(config, config.kv_bytes_per_token)
        self._ctx = ctx
        self._arrays: dict[int, list[Any]] = {}  # by layer
        self._selected = slice(0, 0)
        self._views: dict[int, tuple[list[Any], list[Any]]] = {}  # of the selected rows, by layer
        self._write: Any = None

    def _copy(self, source: int, target: int, length: int) -> None:
        with out_of_memory(self._ctx, "copying a row"):
            self._grow(length)
            arrays = [array for of_layer in self._arrays.values() for array in of_layer]
            for array in arrays:
                array[target, :, :length] = array[source, :, :length]
            for array in arrays:
                array.wait_to_read()

    def clear(self) -> None:
        self._arrays, self._views, self.shape = {}, {}, (0, 0)

    def select(self, begin: int, end: int) -> None:
        """Select rows begin..end-1 for the next forward pass."""
        if self._selected != slice(begin, end):
            self._selected, self._views = slice(begin, end), {}

    def begin(self, T: int) -> np.ndarray[Any, Any]:
        """Allocate space for T tokens in each selected row; return their positions (B, T)."""
        lengths = np.array(self.lengths[self._selected], dtype=np.int64)
        self._grow(int(lengths.max()) + T)
        nh = self.config.num_heads
        positions: np.ndarray[Any, Any] = lengths[:, None] + np.arange(T)  # (B, T)
        rows = np.arange(self._selected.start * nh, self._selected.stop * nh)
        at = np.stack([np.repeat(rows, T), np.repeat(positions, nh, axis=0).ravel()])
        self._write = nd.array(at, ctx=self._ctx, dtype="int32")  # (2, B * nh * T)
        return positions

    def update(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Store k and v (B * nh, T, hs) of a layer; return all keys and values of the rows."""
        if layer not in self._views:
            self._views[layer] = self._make_views(layer)
        flat, selected = self._views[layer]
        for array, new in zip(flat, (k, v), strict=True):
            new = new.reshape((-1, self.config.head_size))
            nd._internal._scatter_set_nd(
                lhs=array, rhs=new, indices=self._write, shape=array.shape, out=array
            )
        return selected[0], selected[1]

    def _make_views(self, layer: int) -> tuple[list[Any], list[Any]]:
        """Return views of a layer, rows and heads as one axis: of all rows, of selected rows."""
        nh, rows = self.config.num_heads, self._selected
        shape = (self.shape[0] * nh, self.shape[1], self.config.head_size)
        flat = [array.reshape(shape) for array in self._arrays[layer]]
        return flat, [array[rows.start * nh : rows.stop * nh] for array in flat]

    def _grow(self, length: int) -> None:
        old_rows, old_capacity = self.shape
        if len(self.lengths) <= old_rows and length <= old_capacity:
            return
        rows, capacity = self.shape_for(len(self.lengths), length)
        shape = (rows, self.config.num_heads, capacity, self.config.head_size)
        for layer in range(self.config.num_layers):
            old = self._arrays.get(layer)
            new = [nd.zeros(shape, ctx=self._ctx) for _ in range(2)]
            for target, source in zip(new, old or (), strict=False):
                target[:old_rows, :, :old_capacity] = source
            self._arrays[layer] = new
        self.shape, self._views = (rows, capacity), {}


@contextmanager
def out_of_memory(ctx: mx.Context, what: str) -> Iterator[None]:
    """Turn MXNet's allocation failures into `OutOfMemory`.

    Operators run later, on MXNet's threads, and fail where their result is waited for, so the
    waiting belongs inside the block.
    """
    try:
        yield
    except (MemoryError, mx.MXNetError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(str(error)):
            raise
        raise OutOfMemory(f"{ctx} has no room for {what}") from error
