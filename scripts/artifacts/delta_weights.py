"""The weights of a fine-tune, computed from its delta and its base."""

from __future__ import annotations

import ctypes
import math
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.artifacts import artifact as names
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.read_safetensors import DTYPES
from engine.artifacts.tensor_index import Weights
from engine.native import library, rotation
from engine.native.delta import Delta, choices_of, layout, matrices
from engine.native.prepared import PreparedFile, prepared
from engine.native.rotation import Floats

DEPTH = 64  # numbers of a column whose bits lie together, see product.h


@dataclass(frozen=True, kw_only=True)
class Computed(Artifact):
    """An artifact with weights in memory."""

    numbers: Weights

    @property
    def weights(self) -> Weights:
        return self.numbers


def whole_of(delta: Delta, cache_dir: Path) -> Artifact:
    """Return the model that a delta is beside its base in int8, with weights in fp32.

    It is close to the fine-tune as far as the delta is. Its LayerNorms are in the matrices behind
    them, so their gamma is 1 and their beta 0, but for the last one.
    """
    config = delta.whole.config
    with closing(prepared(delta.base, "int8", cache_dir)) as base:
        tensors = {
            entry.name: _array(delta.file.addresses[entry.name], entry.shape, entry.dtype)
            for entry in layout(config, choices_of(delta.file.metadata), delta.more)
        }
        weights: dict[str, Floats] = {}
        for layer in range(config.num_layers):
            factors = rotation.head_factors(delta.base.weights, layer)
            for product, pattern in names.PRODUCTS.items():
                name, place = f"{layer}.{product}", f"layers.{layer}.{product}"
                weight = _rotated(name, tensors, delta, base.file, f"{place}.weight")
                bias = _array(base.file.addresses[f"{place}.bias"], (len(weight),), "F32")
                bias = (bias + tensors[f"{name}.bias"][: len(weight)])[:, None]
                _rotate_back(product, weight, bias, config, factors)
                weights[f"{pattern.format(layer)}.weight"] = weight
                weights[f"{pattern.format(layer)}.bias"] = bias[:, 0]
            for pattern in names.NORMS.values():
                weights[f"{pattern.format(layer)}.gamma"] = np.ones(config.units, np.float32)
                weights[f"{pattern.format(layer)}.beta"] = np.zeros(config.units, np.float32)
        for name, source in (("embedding", names.EMBEDDING), ("head", names.OUTPUT)):
            if name in matrices(config):
                place = f"{name}.weight"
                place = place if place in base.file.addresses else "embedding.weight"
                weights[source] = _rotated(name, tensors, delta, base.file, place)
                if delta.more:
                    further = _ungrouped(tensors[f"adapter.more_{name}"])[: delta.more]
                    weights[source] = np.concatenate([weights[source], further])
                rotation.rotate_rows(weights[source], config.units)
    positions = rotation.floats(tensors["adapter.positions"][:, : config.units])
    rotation.rotate_rows(positions, config.units)
    weights[names.POSITIONS] = positions
    for part in ("gamma", "beta"):
        vector = tensors[f"final_norm.{part}"][: config.units]
        weights[f"{names.FINAL_NORM}.{part}"] = vector.astype(np.float32)
    given = {field.name: getattr(delta.whole, field.name) for field in fields(Artifact)}
    return Computed(**given, numbers=weights)


def _rotated(
    name: str, tensors: dict[str, NDArray[Any]], delta: Delta, base: PreparedFile, place: str
) -> Floats:
    """Return a matrix (n, k) in the rotated basis: the base's and what the delta adds."""
    n, k = matrices(delta.whole.config, delta.more)[name]
    up, down = _ungrouped(tensors[f"{name}.up"])[:n], _ungrouped(tensors[f"{name}.down"])
    down = down[:k].T.copy() if name == "embedding" else down[: up.shape[1]]
    if name.endswith("ffn_out"):
        down = np.pad(down, ((0, 0), (0, -k % library.LINE)))
        rotation.rotate_rows(down, down.shape[1] // library.LINE, library.LINE)
    weight = np.empty((n, down.shape[1]), np.float32)
    library.unpack_int8(base.addresses[place], *weight.shape, weight.ctypes.data)
    weight += up @ down
    _, bits = choices_of(delta.file.metadata)[name]
    weight += _unpacked(tensors[f"{name}.rest"].view(np.uint8), bits)[:n, : weight.shape[1]]
    return weight


def _rotate_back(
    product: str, weight: Floats, bias: Floats, config: GPT2Config, factors: Floats
) -> None:
    """Undo `rotation.rotated_product`, in place; what comes out of GELU has whole lines."""
    line = library.LINE
    if product == "ffn_out":
        rotation.rotate_rows(weight, weight.shape[1] // line, line)
    else:
        attended = product == "attention_out"
        rotation.rotate_rows(weight, config.head_size if attended else config.units)
        if attended:
            weight *= factors[2 * config.units :]
    for outputs in (weight, bias):
        if product == "qkv":
            rotation.rotate_columns(outputs, config.head_size)
            outputs /= factors[:, None]
        elif product != "ffn_hidden":
            rotation.rotate_columns(outputs, config.units)


def _unpacked(groups: NDArray[np.uint8], bits: int) -> Floats:
    """Return the numbers (columns, k) of groups in few bits, as product.h has them."""
    size, line = len(groups), library.LINE
    scales = groups[:, -4 * line :].copy().view(np.float32).reshape(-1, 1)
    depths = groups[:, : -4 * line].reshape(size, -1, DEPTH * line * bits // 8)

    def plane(packed: NDArray[np.uint8], width: int) -> NDArray[Any]:
        """Return numbers of `width` bits, four f of a byte at width * f."""
        words = packed.reshape(size, packed.shape[1], -1, line, 4)
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        fours = words[..., None] >> shifts & (2**width - 1)
        return np.asarray(fours.transpose(0, 3, 1, 2, 5, 4).reshape(size * line, -1), np.int32)

    upper = DEPTH * line // 4 if bits & 2 else 0
    numbers = plane(depths[..., :upper], 2) if bits & 2 else plane(depths, 1)
    if bits == 3:
        numbers = 2 * numbers + plane(depths[..., upper:], 1)
    unpacked: Floats = (2 * numbers - (2**bits - 1)).astype(np.float32) * scales
    return unpacked


def _ungrouped(grouped: NDArray[Any]) -> Floats:
    """Return a matrix (n, k) that is packed as (groups, k, LINE)."""
    matrix = grouped.transpose(0, 2, 1).reshape(-1, grouped.shape[1])
    return np.ascontiguousarray(matrix, np.float32)


def _array(address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    kind = np.dtype(DTYPES[dtype])
    size = math.prod(shape) * kind.itemsize
    data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return data.view(kind).reshape(shape)
