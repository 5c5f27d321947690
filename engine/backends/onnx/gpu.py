"""Runs a model with onnxruntime on a GPU: fp16 weights, products, keys and values.

It has not run on a GPU yet. The tests run all of it on the CPU provider, which computes the same
graph, most of it in fp32 between roundings to fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from common import onnx_session
from common.memory import return_freed_memory
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends.dense import MAX_ROWS, DenseCache, DenseModel, Ids
from engine.backends.interface import Logits
from engine.backends.onnx.device import CUDA, Buffers, Provider, buffers, open_session
from engine.backends.onnx.graph import GPT2Graph, kv_names, padded_head_size

ITEM_BYTES = 2  # fp16

to_ort = onnxruntime.OrtValue.ortvalue_from_numpy  # no copy, as long as the array is contiguous


class OnnxGpuModel(DenseModel):
    """A model on the fp16 graph of `engine.backends.onnx.graph`."""

    _cache: DeviceKVCache

    def __init__(self, artifact: Artifact, provider: Provider = CUDA) -> None:
        super().__init__()
        self.config = artifact.config
        graph = GPT2Graph(artifact.config, artifact.weights)
        self.weight_bytes = graph.weight_bytes
        weights = {name: to_ort(tensor) for name, tensor in graph.external.items()}
        self._session = open_session(graph.model.SerializeToString(), provider, weights)
        self._weights = weights if provider.device == "cpu" else {}  # a GPU has its own copy now
        self._device = provider.device
        self._kv_names = list(kv_names(artifact.config, ""))
        self._cache = DeviceKVCache(artifact.config, buffers(provider, len(self._kv_names)))
        # Every pass writes its logits here, since cached bindings refer to these addresses.
        self._logits = np.zeros((MAX_ROWS, artifact.config.vocab_size), dtype=np.float32)

    def compute(self, begin: int, ids: Ids) -> Logits:
        """Run the graph, which is exact for any number of ids only if they are of a single row."""
        end = begin + len(ids)
        lengths = np.array(self._cache.lengths[begin:end])[:, None]
        positions = lengths + np.arange(ids.shape[1])  # (B, T)
        length = int(positions.max()) + 1
        self._cache.hold(length)
        bindings, rows = self._cache.bindings, (begin, end)
        if rows not in bindings:
            bindings[rows] = self._bind(*rows)
        # Copied to the device before each run.
        inputs = {"ids": ids, "positions": positions, "total": np.array([length])}
        inputs = {name: np.ascontiguousarray(a, dtype=np.int32) for name, a in inputs.items()}

        def run() -> None:
            with onnx_session.out_of_memory(f"{ids.size} more tokens"):
                for name, array in inputs.items():
                    bindings[rows].bind_cpu_input(name, array)
                self._session.run_with_iobinding(bindings[rows])

        # A second run does no harm: it writes the same keys and values to the same places.
        self._cache.device.retry_after_trim(run)
        return self._logits[begin:end]

    def close(self) -> None:
        device = self._cache.device
        del self._session, self._weights, self._cache
        device.trim()
        return_freed_memory()

    def _bind(self, begin: int, end: int) -> Any:
        binding = self._session.io_binding()
        binding.bind_ortvalue_output("logits", to_ort(self._logits[begin:end]))
        for name, buffer in zip(self._kv_names, self._cache.buffers, strict=True):
            shape = [end - begin, *buffer.shape[1:]]
            place = (self._device, 0, np.float16, shape, buffer.address(begin))
            binding.bind_input(f"past{name}", *place)
            binding.bind_output(f"present{name}", *place)
        return binding


@dataclass
class Buffer:
    """Keys or values of a layer, (rows, heads, capacity, head size), on the device."""

    value: Any  # an OrtValue
    shape: tuple[int, int, int, int]

    @property
    def row_items(self) -> int:
        return int(np.prod(self.shape[1:]))

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.row_items * ITEM_BYTES

    def address(self, row: int) -> int:
        address: int = self.value.data_ptr() + row * self.row_items * ITEM_BYTES
        return address


class DeviceKVCache(DenseCache):
    """Two buffers a layer, for keys and values; growing them one by one takes less memory."""

    def __init__(self, config: GPT2Config, device: Buffers) -> None:
        self._heads, self._head_size = config.num_heads, padded_head_size(config)
        super().__init__(config, device.count * self._heads * self._head_size * ITEM_BYTES)
        self.device = device
        self.buffers: list[Buffer] = []
        self.bindings: dict[tuple[int, int], Any] = {}  # by rows, until the buffers move

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def shape(self) -> tuple[int, int]:
        # All buffers have one shape, unless memory ran out while they grew.
        return max(((b.shape[0], b.shape[2]) for b in self.buffers), default=(0, 0))

    def hold(self, length: int) -> None:
        """Grow the buffers so that each row can have `length` tokens. Raises `OutOfMemory`."""
        rows = len(self.lengths)
        held = (rows <= b.shape[0] and length <= b.shape[2] for b in self.buffers)
        if self.buffers and all(held):
            return
        self.bindings.clear()
        rows, capacity = self.shape_for(rows, length)
        shape = (rows, self._heads, capacity, self._head_size)
        as_floats = (*shape[:3], self._head_size // 2)
        if not self.buffers:
            empty = np.zeros((1, self._heads, 1, self._head_size // 2), dtype=np.float32)
            count = self.device.count
            self.buffers = [Buffer(self.device.grow(empty, as_floats), shape) for _ in range(count)]
        for i, buffer in enumerate(self.buffers):
            if buffer.shape != shape:
                self.buffers[i] = Buffer(self.device.grow(buffer.value, as_floats), shape)

    def _copy(self, source: int, target: int, length: int) -> None:
        self.hold(length)
        sources, targets = ([b.address(row) for b in self.buffers] for row in (source, target))
        self.device.copy(sources, targets, self.buffers[0].row_items // 2)

    def clear(self) -> None:
        self.buffers = []
        self.bindings.clear()


def load(artifact: Artifact, provider: Provider = CUDA) -> OnnxGpuModel:
    """Load a model. Raises `OutOfMemory`, `InvalidRequest`; `ArtifactError` beyond fp16."""
    return OnnxGpuModel(artifact, provider)
