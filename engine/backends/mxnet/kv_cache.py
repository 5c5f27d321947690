"""The K/V cache of a batch in MXNet's arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from common.errors import OutOfMemory
from common.memory import is_out_of_memory
from common.mxnet_compat import mx
from engine.artifacts.config import GPT2Config
from engine.backends.dense import grown_shape

nd = mx.nd


class MXNetKVCache:
    """Keys and values of the rows of a batch, each row with its own length.

    Two arrays (rows, heads, capacity, hs) a layer, which grow by `grown_shape`. Positions beyond a
    row's length are masked, not cleared.
    """

    def __init__(self, config: GPT2Config, ctx: Any):
        self.config, self._ctx = config, ctx
        self.lengths: list[int] = []
        self._rows = self._capacity = 0
        self._arrays: dict[int, list[Any]] = {}  # by layer
        self._selected = slice(0, 0)
        self._views: dict[int, tuple[list[Any], list[Any]]] = {}  # while they hold
        self._write: Any = None

    @property
    def num_bytes(self) -> int:
        return self._rows * self._capacity * self.config.kv_bytes_per_token

    def num_bytes_for(self, lengths: Sequence[int]) -> int:
        """Bytes with rows of these lengths.

        All rows are as long as the longest, and the cache does not shrink before it is empty.
        """
        if not lengths:
            return 0
        rows, capacity = self._shape_for(len(lengths), max(lengths))
        return rows * capacity * self.config.kv_bytes_per_token

    def _shape_for(self, rows: int, length: int) -> tuple[int, int]:
        return grown_shape((self._rows, self._capacity), rows, length, self.config.max_length)

    def add_row(self) -> int:
        self.lengths.append(0)
        return len(self.lengths) - 1

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy a row and wait for it; raises what fails."""
        self.lengths[target] = length
        if length:
            with out_of_memory(self._ctx, "copying a row"):
                self._grow(len(self.lengths), length)
                for array in self._all():
                    array[target, :, :length] = array[source, :, :length]
                _wait(self._all())

    def _all(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._arrays.values())

    def remove_last_row(self) -> None:
        self.lengths.pop()
        if not self.lengths:
            self._arrays, self._views, self._rows, self._capacity = {}, {}, 0, 0

    def select(self, begin: int, end: int) -> None:
        """Select rows begin..end-1 for the next forward pass."""
        if self._selected != slice(begin, end):
            self._selected, self._views = slice(begin, end), {}

    def begin(self, T: int) -> np.ndarray[Any, Any]:
        """Make space for T tokens in each selected row; returns their positions (B, T)."""
        lengths = np.array(self.lengths[self._selected], dtype=np.int64)
        self._grow(len(self.lengths), int(lengths.max()) + T)
        nh = self.config.num_heads
        positions: np.ndarray[Any, Any] = lengths[:, None] + np.arange(T)  # (B, T)
        rows = np.arange(self._selected.start * nh, self._selected.stop * nh)
        at = np.stack([np.repeat(rows, T), np.repeat(positions, nh, axis=0).ravel()])
        self._write = nd.array(at, ctx=self._ctx, dtype="int32")  # (2, B * nh * T)
        return positions

    def update(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Stores k and v (B * nh, T, hs) of a layer; returns all keys and values."""
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
        """A layer with rows and heads as one axis: all rows, and the selected ones."""
        nh, rows = self.config.num_heads, self._selected
        shape = (self._rows * nh, self._capacity, self.config.head_size)
        flat = [array.reshape(shape) for array in self._arrays[layer]]
        return flat, [array[rows.start * nh : rows.stop * nh] for array in flat]

    def end(self, T: int) -> None:
        for row in range(self._selected.start, self._selected.stop):
            self.lengths[row] += T

    def _grow(self, rows: int, length: int) -> None:
        if rows <= self._rows and length <= self._capacity:
            return
        rows, capacity = self._shape_for(rows, length)
        shape = (rows, self.config.num_heads, capacity, self.config.head_size)
        for layer in range(self.config.num_layers):
            old = self._arrays.get(layer)
            new = [nd.zeros(shape, ctx=self._ctx) for _ in range(2)]
            for target, source in zip(new, old or (), strict=False):
                target[: self._rows, :, : self._capacity] = source
            self._arrays[layer] = new
        self._rows, self._capacity, self._views = rows, capacity, {}


def _wait(arrays: Iterable[Any]) -> None:
    for array in arrays:
        array.wait_to_read()


@contextmanager
def out_of_memory(ctx: mx.Context, what: str) -> Iterator[None]:
    """Turn MXNet's allocation failures into `OutOfMemory`.

    Operators run later, on MXNet's threads, and fail where their result is waited for, so the
    waiting belongs inside the block.
    """
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"{ctx} has no room for {what}") from error
    except mx.MXNetError as error:
        if not is_out_of_memory(str(error)):
            raise
        raise OutOfMemory(f"{ctx} has no room for {what}") from error
