"""How onnxruntime keeps int8 matrices for processors with AVX2 or AVX-512.

It packs a matrix in a session of that operator alone as well, but takes five times as long. Whether
it packs so here is tried before (`engine.prepared.build`): other processors and other versions of
it have layouts of their own.

Of (N, K/block, block) quantized numbers, one after the other:

    the numbers      four rows beside each other, in turns of 128 of each; what is left of these
                     rows in turns of a block; rows beyond a multiple of four as they are
    zeros            up to a multiple of 64 bytes
    -128 * scales    sixteen rows beside each other, in turns of one; filled up with zeros
    scales           as the numbers that they belong to
    zeros            so that there is room to begin at any address

https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/mlas/lib/sqnbitgemm_kernel_avx2.cpp
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.onnx.quantize import ZERO

Array = NDArray[Any]

ALIGNMENT = 64
ROOM = 2 * (ALIGNMENT - 1)
ROWS = 4
NUMBERS = 128
SUMMED_ROWS = 16
GROUPS_AT_ONCE = 64


def num_bytes(quantized: NDArray[np.uint8]) -> int:
    """What (N, blocks, block) quantized numbers take, packed."""
    rows, blocks, _ = quantized.shape
    scales = rows + rows + -rows % SUMMED_ROWS
    return quantized.size + 4 * blocks * scales + ROOM


def views(
    data: NDArray[np.uint8], rows: int, blocks: int, block: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The numbers (rows * blocks, block) and the scales (rows * blocks,) in what is packed, in the
    order of `places`."""
    size = rows * blocks * block
    begin = size + -size % ALIGNMENT + 4 * blocks * (rows + -rows % SUMMED_ROWS)
    scales = data[begin : begin + 4 * rows * blocks].view(np.float32)
    return data[:size].reshape(-1, block), scales


def places(ids: NDArray[Any], rows: int, blocks: int, block: int) -> NDArray[np.int64]:
    """Where the blocks of these of the rows are: (T,) -> (T, blocks)."""
    wide, number = max(NUMBERS // block, 1), np.arange(blocks)
    whole, even = rows - rows % ROWS, blocks - blocks % wide
    in_turns = number < even
    begins = np.where(in_turns, number // wide * (ROWS * wide) + number % wide, number * ROWS)
    group, row = np.divmod(ids[:, None], ROWS)
    beside = begins + row * np.where(in_turns, wide, 1)
    found: NDArray[np.int64] = np.where(ids[:, None] < whole, beside, number + row * blocks)
    return group * (ROWS * blocks) + found


def packed(quantized: NDArray[np.uint8], scales: NDArray[np.float32]) -> Iterator[memoryview]:
    """(N, blocks, block) uint8 and (N * blocks,) float32 -> the bytes, a part after the other."""
    for part in _parts(quantized, scales):
        yield part.reshape(-1).view(np.uint8).data


def _parts(quantized: NDArray[np.uint8], scales: NDArray[np.float32]) -> Iterator[Array]:
    rows, blocks, block = quantized.shape
    wide = max(NUMBERS // block, 1)
    scale = scales.reshape(rows, blocks, 1)
    yield from _beside(quantized, wide)
    gap = -quantized.size % ALIGNMENT
    yield np.zeros(gap, np.uint8)
    sums = np.zeros((rows + -rows % SUMMED_ROWS, blocks), np.float32)
    np.multiply(scale[..., 0], np.float32(-ZERO), out=sums[:rows])
    yield np.ascontiguousarray(sums.reshape(-1, SUMMED_ROWS, blocks).swapaxes(1, 2))
    yield from _beside(scale, wide)
    yield np.zeros(ROOM - gap, np.uint8)


def _beside(values: Array, wide: int) -> Iterator[Array]:
    """(N, blocks, n): rows in groups of `ROWS`, in turns of `wide` blocks."""
    rows, blocks, length = values.shape
    whole, even = rows - rows % ROWS, blocks - blocks % wide
    for begin in range(0, whole, ROWS * GROUPS_AT_ONCE):
        group = values[begin : min(begin + ROWS * GROUPS_AT_ONCE, whole)]
        group = group.reshape(-1, ROWS, blocks, length)
        turns = [
            group[:, :, :even].reshape(len(group), ROWS, -1, wide * length),
            group[:, :, even:],
        ]
        parts = [turn.swapaxes(1, 2).reshape(len(group), -1) for turn in turns]
        yield parts[0] if even == blocks else np.concatenate(parts, axis=1)
    yield np.ascontiguousarray(values[whole:])
