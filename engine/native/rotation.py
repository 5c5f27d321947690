"""The rotated basis in which a model in int8 is computed.

Trained models have a few channels that are hundreds of times larger than the others, and with one
scale a row those would leave the others few of the int8 numbers. A rotation spreads each channel
over all. It is orthogonal, so x W^T = (x R) (W R)^T, and multiplied into the weights once:

- The residual stream is rotated: what is added to it (embedding, positions, `attention_out`,
  `ffn_out`), and the inputs of what reads it (`qkv`, `ffn_hidden`, head).
- Before that, LayerNorm goes into its neighbors: gamma and beta into the matrix behind it, and the
  subtraction of the mean into what is added to the stream. Only a division by the root mean square
  is left. The head's norm is computed as it is, because a tied embedding cannot hold gamma.
- Queries and keys of a head are rotated alike, which their products do not change, and values with
  the inputs of `attention_out`. Before that, a channel that is large on one side and small on the
  other is made equally large on both, by a power of two.
- What comes out of GELU is rotated in the pass, lines of 16 numbers with each other, and the inputs
  of `ffn_out` here. Its mean is estimated from the weights before GELU, and what it loses by the
  rounding of `ffn_out` is added to the bias.

QuaRot: https://arxiv.org/abs/2404.00456. SliceGPT, for LayerNorm: https://arxiv.org/abs/2401.15024.
Equal channels and the bias: https://arxiv.org/abs/1906.04721.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.artifacts import artifact as names
from engine.artifacts.config import GPT2Config
from engine.native import library

Floats = NDArray[np.float32]

# The LayerNorm before a product.
NORM_BEFORE = {"qkv": "attention_norm", "ffn_hidden": "ffn_norm"}


def norm_before(layer: int | str, product: str) -> str | None:
    """Return the name in an artifact of the LayerNorm before a product; None if there is none."""
    norm = NORM_BEFORE.get(product)
    return None if norm is None else names.NORMS[norm].format(layer)


def floats(weight: NDArray[Any]) -> Floats:
    """Return a copy (rows, columns) in fp32."""
    return np.array(weight, np.float32, order="C", ndmin=2)


def rotate_rows(weight: Floats, size: int, lanes: int = 1) -> None:
    """Multiply each row, in parts of `size` groups of `lanes` numbers, with R, in place."""
    library.rotate(weight.ctypes.data, weight.size // (size * lanes), size, lanes)


def rotate_columns(weight: Floats, size: int) -> None:
    """Multiply each column of a matrix, in parts of `size` numbers, with R, in place."""
    library.rotate(weight.ctypes.data, len(weight) // size, size, weight.shape[1])


def fold_norm(weight: Floats, bias: Floats, gamma: NDArray[Any], beta: NDArray[Any]) -> None:
    """Multiply a LayerNorm's gamma and beta into the weight (n, k) and bias (n,) behind it."""
    factors = np.array(beta, np.float32)
    addresses = weight.ctypes.data, factors.ctypes.data
    library.add_products(*addresses, *weight.shape, bias.ctypes.data)
    weight *= np.asarray(gamma, np.float32)


def head_factors(weights: Mapping[str, Any], layer: int | str) -> Floats:
    """Return what the queries, keys and values (3 C,) of a layer are multiplied with.

    The inverses for keys are those for queries, and the inverses for values are multiplied into
    `attention_out`. Its error is least if a channel's values are as large as its columns there.
    """
    qkv, out = (names.PRODUCTS[product].format(layer) for product in ("qkv", "attention_out"))
    gamma = weights[f"{names.ATTENTION_NORM.format(layer)}.gamma"]
    squares = np.square(floats(weights[f"{qkv}.weight"]) * gamma).sum(axis=1)
    queries, keys, values = np.split(squares, 3)
    outputs = np.square(floats(weights[f"{out}.weight"])).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.concatenate([keys / queries, queries / keys, outputs / values])
    # fourth roots: squares of both sides; zero, infinity and NaN have the exponent 0
    exponents = np.rint((np.frexp(ratios)[1] - 0.5) / 4).astype(np.int32)
    factors: Floats = np.ldexp(np.float32(1), exponents)
    return factors


def mean_hidden(weight: Floats, bias: Floats) -> Floats:
    """Estimate the mean of what comes out of GELU (n,), with the LayerNorm folded into the weight.

    What goes into it has a normal distribution if the inputs have. GELU's mean is then close to
    that of a smooth step: exact without a deviation, and at 0.
    """
    variance = np.square(weight).sum(axis=1)
    width = (2 / np.pi) * np.square(variance) / (1 + variance)
    mean: Floats = (bias + np.sqrt(np.square(bias) + width)) / 2
    return mean


def rotate_outputs(product: str, weight: Floats, config: GPT2Config, factors: Floats) -> None:
    """Rotate the outputs of a product's matrix or bias, (n, ...), in place.

    factors: of `head_factors`
    """
    if product == "qkv":
        weight *= factors[:, None]
        rotate_columns(weight, config.head_size)
    elif product != "ffn_hidden":
        weight -= weight.mean(axis=0, dtype=np.float64).astype(np.float32)
        rotate_columns(weight, config.units)


def rotate_inputs(product: str, weight: Floats, config: GPT2Config, factors: Floats) -> Floats:
    """Rotate the inputs of a product's matrix (n, k); returns the matrix."""
    if product == "attention_out":
        weight /= factors[2 * config.units :]
    if product == "ffn_out":
        line = library.LINE
        weight = np.pad(weight, ((0, 0), (0, -weight.shape[1] % line)))
        rotate_rows(weight, weight.shape[1] // line, line)
    else:
        rotate_rows(weight, config.head_size if product == "attention_out" else config.units)
    return weight


def rotated_product(
    product: str, weight: Floats, bias: Floats, config: GPT2Config, factors: Floats
) -> tuple[Floats, Floats]:
    """Return weight (n, k) and bias (n,) in the rotated basis; changes the arguments."""
    bias = bias.reshape(-1, 1)
    rotate_outputs(product, weight, config, factors)
    rotate_outputs(product, bias, config, factors)
    return rotate_inputs(product, weight, config, factors), bias[:, 0]
