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
  the inputs of `attention_out`.
- What comes out of GELU is rotated in the pass, lines of 16 numbers with each other, and the inputs
  of `ffn_out` here.

QuaRot: https://arxiv.org/abs/2404.00456. SliceGPT, for LayerNorm: https://arxiv.org/abs/2401.15024.
"""

from __future__ import annotations

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


def rotate_outputs(product: str, weight: Floats, config: GPT2Config) -> None:
    """Rotate the outputs of a product's matrix or bias, (n, ...), in place."""
    if product == "qkv":
        rotate_columns(weight, config.head_size)
    elif product != "ffn_hidden":
        weight -= weight.mean(axis=0, dtype=np.float64).astype(np.float32)
        rotate_columns(weight, config.units)


def rotate_inputs(product: str, weight: Floats, config: GPT2Config) -> Floats:
    """Rotate the inputs of a product's matrix (n, k); returns the matrix."""
    if product == "ffn_out":
        line = library.LINE
        weight = np.pad(weight, ((0, 0), (0, -weight.shape[1] % line)))
        rotate_rows(weight, weight.shape[1] // line, line)
    else:
        rotate_rows(weight, config.head_size if product == "attention_out" else config.units)
    return weight


def rotated_product(
    product: str, weight: Floats, bias: Floats, config: GPT2Config
) -> tuple[Floats, Floats]:
    """Return weight (n, k) and bias (n,) in the rotated basis; changes the arguments."""
    bias = bias.reshape(-1, 1)
    rotate_outputs(product, weight, config)
    rotate_outputs(product, bias, config)
    return rotate_inputs(product, weight, config), bias[:, 0]
