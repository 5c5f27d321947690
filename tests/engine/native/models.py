"""Small random models for the C library, and the same pass in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from common.errors import InvalidRequest
from engine.artifacts import artifact as names
from engine.artifacts.config import GPT2Config
from engine.native import library, rotation

Floats = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    layers: int
    units: int
    heads: int
    hidden: int
    vocab: int
    max_length: int


# Units, hidden units, vocabulary and the size of a head that are no multiples of 16 or of a block,
# one head, and a row that ends in the midst of a page.
SHAPES = [
    Shape(2, 48, 4, 100, 301, 70),
    Shape(1, 64, 1, 128, 99, 64),
    Shape(2, 40, 5, 72, 200, 90),
    Shape(1, 150, 2, 30, 33, 50),
]


PRODUCTS = {"qkv": "qkv", "attention_out": "out", "ffn_hidden": "up", "ffn_out": "down"}


def supported_kernels() -> list[str]:
    """Names of the kernels that this processor runs."""
    names = []
    for name in ("amx", "vnni", "avx2", "neon", "plain"):
        try:
            names.append(library.use_kernels(name))
        except InvalidRequest:
            continue
    library.start()
    return names


KERNELS = supported_kernels()


def random_weights(shape: Shape, seed: int = 0, scale: float = 0.3) -> dict[str, Floats]:
    """Weights by name: (outputs, inputs), as in an artifact; norms as (2, units)."""
    rng = np.random.default_rng(seed)
    c, f = shape.units, shape.hidden
    sizes = {"embedding": (shape.vocab, c), "positions": (shape.max_length, c), "norm": (2, c)}
    for i in range(shape.layers):
        products = {"qkv": (3 * c, c), "out": (c, c), "up": (f, c), "down": (c, f)}
        for name, (n, k) in products.items():
            sizes |= {f"{i} {name}": (n, k), f"{i} {name} bias": (n,)}  # type: ignore[dict-item]
        sizes |= {f"{i} attention norm": (2, c), f"{i} ffn norm": (2, c)}
    weights = {
        name: rng.standard_normal(size, dtype=np.float32) * np.float32(scale)
        for name, size in sizes.items()
    }
    for name, values in weights.items():
        if name.endswith("norm"):
            values[0] += 1
    return weights


def pack(weight: Floats, int8: bool) -> NDArray[np.uint8]:
    """A matrix of (columns, numbers), of any strides, as the library wants it."""
    n, k = weight.shape
    packed = np.zeros(library.packed_bytes(n, k, int8), np.uint8)
    source = {"float32": 0, "float16": 1, "uint16": 2}[weight.dtype.name]  # uint16: bfloat16's bits
    strides = [stride // weight.itemsize for stride in weight.strides]
    at = 0
    for first in range(0, n, 3 * library.LINE):  # as several threads would
        part = weight[first : first + 3 * library.LINE]
        shape = part.shape
        library.pack(part.ctypes.data, source, *strides, *shape, int8, packed[at:].ctypes.data)
        at += library.packed_bytes(*shape, int8)
    return packed


def rounded(weight: Floats) -> Floats:
    """A matrix as int8 numbers with a scale for each column, (columns, numbers), give it."""
    weight = weight.astype(np.float64)
    lowest, highest = (m(weight, axis=1, keepdims=True, initial=0) for m in (np.min, np.max))
    scales = np.maximum((highest - lowest) / 254, np.maximum(highest, -lowest) / 168)
    numbers = np.divide(weight, scales, out=np.zeros(weight.shape), where=scales > 0)
    result: Floats = np.rint(numbers) * scales
    return result


def config_of(shape: Shape) -> GPT2Config:
    sizes = (shape.vocab, shape.units, shape.layers, shape.heads, shape.hidden)
    return GPT2Config(*sizes, max_length=shape.max_length)


def as_rounded(shape: Shape, weights: dict[str, Floats]) -> dict[str, Floats]:
    """The weights whose logits are those of the rounded, rotated ones: these, rotated back."""
    config, result = config_of(shape), dict(weights)
    factors = [head_factors(weights, layer) for layer in range(shape.layers)]
    for name, value in rotated(shape, weights).items():
        if name.startswith(("norm", "positions")):
            continue
        product = next((p for p, n in PRODUCTS.items() if name.split()[1:2] == [n]), "")
        weight = (
            rotation.floats(value).T if name.endswith("bias") else rotation.floats(rounded(value))
        )
        weight = np.ascontiguousarray(weight)
        if product not in ("", "ffn_hidden"):
            size = config.head_size if product == "qkv" else shape.units
            rotation.rotate_columns(weight, size)
        if product == "qkv":
            weight /= factors[int(name[0])][:, None]
        if not name.endswith("bias"):
            same = np.ones(3 * shape.units, np.float32)
            weight = rotation.rotate_inputs(product, weight, config, same)
        if product == "attention_out" and not name.endswith("bias"):
            weight *= factors[int(name[0])][2 * shape.units :]
        result[name] = (
            weight[:, 0] if name.endswith("bias") else weight[:, : weights[name].shape[1]]
        )
        if product in rotation.NORM_BEFORE:
            norm = rotation.NORM_BEFORE[product].replace("_", " ")
            result[f"{name[0]} {norm}"] = np.array([[1.0], [0.0]]) + np.zeros((2, shape.units))
    return result


def head_factors(weights: dict[str, Floats], layer: int) -> Floats:
    by_name = {
        f"{names.QKV}.weight": weights[f"{layer} qkv"],
        f"{names.ATTENTION_OUT}.weight": weights[f"{layer} out"],
        f"{names.ATTENTION_NORM}.gamma": weights[f"{layer} attention norm"][0],
    }
    return rotation.head_factors({n.format(layer): w for n, w in by_name.items()}, layer)


def rotated(shape: Shape, weights: dict[str, Floats]) -> dict[str, Floats]:
    """The weights of a model in int8, before they are rounded; a layer's norms are gone."""
    config, result = config_of(shape), {"norm": weights["norm"]}
    for name in ("embedding", "positions"):
        result[name] = rotation.floats(weights[name])
        rotation.rotate_rows(result[name], shape.units)
    for i in range(shape.layers):
        factors = head_factors(weights, i)
        for product, name in PRODUCTS.items():
            weight = rotation.floats(weights[f"{i} {name}"])
            bias = rotation.floats(weights[f"{i} {name} bias"])[0]
            if norm := rotation.NORM_BEFORE.get(product):
                rotation.fold_norm(weight, bias, *weights[f"{i} {norm.replace('_', ' ')}"])
            weight, bias = rotation.rotated_product(product, weight, bias, config, factors)
            result[f"{i} {name}"], result[f"{i} {name} bias"] = weight, bias
    return result


def reference(
    shape: Shape, weights: dict[str, Floats], ids: Sequence[int], tanh: bool = False
) -> Floats:
    """Logits (tokens, vocab) of one row, in double precision."""
    w, c = weights, shape.units
    length, heads, size = len(ids), shape.heads, shape.units // shape.heads

    def norm(x: Floats, name: str) -> Floats:
        gamma, beta = w[name].astype(np.float64)
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + 1e-5
        ) * gamma + beta

    def dense(x: Floats, name: str) -> Floats:
        return x @ w[name].T.astype(np.float64) + w[name + " bias"]

    x = w["embedding"][list(ids)].astype(np.float64) + weights["positions"][:length]
    future = np.triu(np.full((length, length), -np.inf), 1)
    for i in range(shape.layers):
        qkv = dense(norm(x, f"{i} attention norm"), f"{i} qkv")
        q, k, v = (y.reshape(length, heads, size).swapaxes(0, 1) for y in np.split(qkv, 3, -1))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(size) + future
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = scores / scores.sum(-1, keepdims=True) @ v
        x = x + dense(attended.swapaxes(0, 1).reshape(length, c), f"{i} out")
        y = dense(norm(x, f"{i} ffn norm"), f"{i} up")
        if tanh:
            y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        else:
            y = 0.5 * y * (1 + erf(y / math.sqrt(2)))
        x = x + dense(y, f"{i} down")
    result: Floats = norm(x, "norm") @ w["embedding"].T.astype(np.float64)
    return result


Part = tuple[Sequence[int], Sequence[int], int, int]  # ids, pages, position, number of logits


class NativeModel:
    """A model with its own arena of pages; `run` computes pieces and returns logits."""

    def __init__(
        self,
        shape: Shape,
        weights: dict[str, Floats],
        int8: bool = False,
        tanh: bool = False,
        pages: int = 32,
        run_pass: Callable[..., None] = library.run_pass,
    ) -> None:
        self.shape, self._run_pass = shape, run_pass
        weights = rotated(shape, weights) if int8 else weights
        self._arrays: list[Any] = []

        def keep(array: Any) -> int:
            self._arrays.append(array)
            address: int = array.ctypes.data
            return address

        def padded(values: Floats) -> int:
            width = values.shape[-1]
            fill = [(0, 0)] * (values.ndim - 1) + [(0, -width % library.LINE)]
            return keep(np.ascontiguousarray(np.pad(values, fill)))

        def matrix(name: str) -> library.Matrix:
            bias = padded(weights[name + " bias"])
            return library.Matrix(keep(pack(weights[name], int8)), bias)

        def norm(name: str) -> library.Norm:
            return library.Norm(*(padded(values) for values in weights.get(name, ())))

        layers = (library.Layer * shape.layers)()
        for i in range(shape.layers):
            layers[i] = library.Layer(
                *(norm(f"{i} attention norm"), matrix(f"{i} qkv"), matrix(f"{i} out")),
                *(norm(f"{i} ffn norm"), matrix(f"{i} up"), matrix(f"{i} down")),
                (shape.units // shape.heads) ** -0.5,
            )
        embedding = keep(pack(weights["embedding"], int8))
        sizes = (shape.layers, shape.units, shape.heads, shape.hidden, shape.vocab)
        self.struct = library.Model(
            *(*sizes, shape.max_length, int8, tanh, 1e-5, layers, norm("norm"), embedding),
            padded(weights["positions"]),
            library.Matrix(embedding, None),
        )
        # Not zeros: a pass must not depend on what was on a page.
        self.page_bytes = library.page_bytes(config_of(shape), "int8" if int8 else "fp32")
        self.arena = np.full(pages * self.page_bytes, 0xFF, np.uint8)

    def run(self, parts: Sequence[Part]) -> Floats:
        """Logits (wanted, vocab) of a pass."""
        wanted = sum(part[3] for part in parts)
        width = -(-self.shape.vocab // library.LINE) * library.LINE
        logits = np.full((wanted, width), np.nan, np.float32)
        arrays = [[np.array(values, np.int32) for values in part[:2]] for part in parts]
        pieces = (library.Piece * len(parts))(
            *(
                library.Piece(ids.ctypes.data, pages.ctypes.data, len(ids), position, count)
                for (ids, pages), (_, _, position, count) in zip(arrays, parts, strict=True)
            )
        )
        self._run_pass(self.struct, self.arena.ctypes.data, pieces, len(parts), logits.ctypes.data)
        return logits[:, : self.shape.vocab]
