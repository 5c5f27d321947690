"""The low-rank matrices of an adapter (LoRA, https://arxiv.org/abs/2106.09685) as the library reads
them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from engine.artifacts.adapter import BASE_NAMES, Adapter
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.native import library


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a product with x (T, k): `up (down x + bias)`."""

    down: NDArray[np.float32]  # (rank, k)
    up: NDArray[np.float32]  # (n, rank)
    bias: NDArray[np.float32] | None = None  # (rank,)


class NativeAdapter:
    """The matrices of all layers, packed: fp16 for a model in int8, fp32 for one in fp32."""

    def __init__(
        self,
        config: GPT2Config,
        precision: str,
        matrices: Mapping[tuple[int, str], LowRank],
    ) -> None:
        """`matrices`: by layer and product, one of `library.PRODUCTS`.

        Raises `ArtifactError` for numbers that fp16 does not hold.
        """
        self._layers = (library.AdapterLayer * config.num_layers)()
        self._arrays: list[NDArray[Any]] = []
        self.address = ctypes.addressof(self._layers)
        dtype = np.float16 if precision == "int8" else np.float32
        for (layer, product), matrix in matrices.items():
            entry = getattr(self._layers[layer], product)
            entry.rank = len(matrix.down)
            entry.down = self._add(_packed(matrix.down, dtype))
            entry.up = self._add(_packed(matrix.up, dtype))
            if matrix.bias is not None:
                bias = np.zeros(_padded(entry.rank), np.float32)
                bias[: entry.rank] = matrix.bias
                entry.bias = self._add(bias)

    def _add(self, array: NDArray[Any]) -> int:
        """Keeps an array, which the library reads; returns its address."""
        if not np.isfinite(array).all():
            raise ArtifactError("the adapter holds numbers that are too large for fp16")
        self._arrays.append(array)
        return array.ctypes.data

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)


def packed_bytes(adapter: Adapter, precision: str) -> int:
    """Bytes of an adapter's matrices once they are packed, for admission before anything is."""
    size, total = 2 if precision == "int8" else 4, 0
    for module in adapter.scales:
        rank, inputs = adapter.index[f"{module}.down"].shape
        outputs = adapter.index[f"{module}.up"].shape[0]
        biased = f"{module}.bias" in adapter.index or f"{module}.up_bias" in adapter.index
        total += size * _padded(rank + biased) * inputs + 4 * _padded(rank + 1) * biased
        total += size * _padded(outputs) * (rank + biased)
    return total


def load_adapter(adapter: Adapter, base: Artifact, precision: str) -> NativeAdapter:
    """Packs an adapter for its base. Raises `ArtifactError` where it does not fit that."""
    adapter.check_fits(base.config)
    return NativeAdapter(base.config, precision, low_ranks(adapter, base))


def low_ranks(adapter: Adapter, base: Artifact) -> dict[tuple[int, str], LowRank]:
    """An adapter's matrices by layer and product, its scales in `up`."""
    matrices = {}
    for module, scale in adapter.scales.items():
        layer, product = module.split(".")
        matrices[int(layer), product] = _low_rank(adapter, base, module, scale)
    return matrices


def _low_rank(adapter: Adapter, base: Artifact, module: str, scale: float) -> LowRank:
    def numbers(name: str, weights: Mapping[str, NDArray[Any]] = adapter.weights) -> Any:
        return np.asarray(weights[name], np.float32) if name in weights else None

    layer, product = module.split(".")
    down, up = numbers(f"{module}.down"), scale * numbers(f"{module}.up")
    more = np.zeros(len(up), np.float32)  # beside the product: what was trained of biases
    if (up_bias := numbers(f"{module}.up_bias")) is not None:
        more += scale * up_bias
    if (bias := numbers(f"{module}.bias")) is not None:
        more += bias - numbers(f"{BASE_NAMES[product].format(layer)}.bias", base.weights)
    if f"{module}.bias" not in adapter.index and f"{module}.up_bias" not in adapter.index:
        return LowRank(down, up)
    # One more rank, whose number is always 1.
    ones = np.array([0.0] * len(down) + [1.0], np.float32)
    down = np.concatenate([down, np.zeros((1, down.shape[1]), np.float32)])
    return LowRank(down, np.concatenate([up, more[:, None]], axis=1), ones)


def _padded(count: int) -> int:
    return -(-count // library.LINE) * library.LINE


def _packed(matrix: NDArray[np.float32], dtype: Any) -> NDArray[Any]:
    """A matrix (n, k) in groups of `library.LINE` columns: (groups, k, LINE), see product.h."""
    n, k = matrix.shape
    padded = np.zeros((_padded(n), k), dtype)
    with np.errstate(over="ignore"):
        padded[:n] = matrix
    return np.ascontiguousarray(padded.reshape(-1, library.LINE, k).transpose(0, 2, 1))
