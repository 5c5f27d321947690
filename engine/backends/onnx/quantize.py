"""Quantizes fp32 weights to int8 in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 64
MIN_BLOCK_SIZE = 16
NUMBERS_AT_ONCE = 1 << 17  # such a piece stays in a core's cache
ZERO = 128  # what stands for 0
MAX = 127
MAGNITUDE = np.int32(0x7FFFFFFF)  # of a float32's bits, all but the sign


def block_size(width: int) -> int:
    """The largest block that fills the width without padding, else the smallest allowed."""
    block = BLOCK_SIZE
    while block > MIN_BLOCK_SIZE and width % block:
        block //= 2
    return block


def quantize(
    weight: NDArray[Any], block: int = BLOCK_SIZE
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(N, K) floats -> (N, K/block, block) uint8 and (N * K/block,) float32 scales.

    weight = (quantized - 128) * scale, symmetric: scale is the block's absolute maximum / 127. K is
    padded with zeros to whole blocks. Wrong to at most half a scale per weight.
    """
    rows, width = weight.shape
    blocks = -(-width // block)
    quantized = np.empty((rows, blocks, block), dtype=np.uint8)
    scales = np.empty((rows, blocks), dtype=np.float32)

    at_once = max(NUMBERS_AT_ONCE // (blocks * block), 1)
    w = np.zeros((at_once, blocks * block), dtype=np.float32)
    magnitudes = np.empty(w.shape, dtype=np.int32)
    begins = np.arange(0, w.size, block)
    for begin in range(0, rows, at_once):
        count = min(at_once, rows - begin)
        w[:count, :width] = weight[begin : begin + count]
        v = w[:count].reshape(count, blocks, block)
        # The bits of magnitudes compare as these do, in half the time, and `reduceat` takes half
        # of that of `max(axis=-1)`, which begins anew for each block.
        np.bitwise_and(w[:count].view(np.int32), MAGNITUDE, out=magnitudes[:count])
        largest = np.maximum.reduceat(magnitudes[:count].reshape(-1), begins[: count * blocks])
        scale = largest.view(np.float32).reshape(count, blocks) / np.float32(MAX)
        scales[begin : begin + count] = scale
        # A block of zeros has the scale 0; any divisor gives its zeros back.
        v /= np.where(scale > 0, scale, 1)[..., None]
        v += np.float32(ZERO)
        np.rint(v, out=v)
        quantized[begin : begin + count] = v
        w[:, width:] = 0
    return quantized, scales.reshape(-1)


def dequantize(
    quantized: NDArray[np.uint8], scales: NDArray[np.float32], width: int
) -> NDArray[np.float32]:
    """The (N, width) floats that the blocks stand for."""
    rows, blocks, block = quantized.shape
    w = quantized.astype(np.float32) - np.float32(ZERO)
    w *= scales.reshape(rows, blocks, 1)
    return w.reshape(rows, blocks * block)[:, :width]
