"""How Int8MatMul, our operator for onnxruntime, reads int8 matrices: `int8/matmul.c` says how.

Of (N, K/block, block) quantized numbers, sixteen rows at a time, which are a group, and the last of
which is filled up with zeros; of each group one block of K after the other:

    numbers  (block/4, 16, 4) uint8
    scales   (16,) float32
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineError
from engine.backends.onnx.quantize import ZERO

LIBRARY = Path(__file__).with_name("int8_matmul" + importlib.machinery.EXTENSION_SUFFIXES[0])
ROWS = 16  # of a group
TOGETHER = 4  # numbers
GROUPS_AT_ONCE = 16


def library() -> Path:
    """What setuptools makes of `int8/*.c`, beside this file. Raises `EngineError`."""
    if not LIBRARY.exists():
        raise EngineError(
            f"{LIBRARY.name} is not built: pip install -e . makes it, with a C compiler"
        )
    return LIBRARY


def num_bytes(rows: int, width: int, block: int) -> int:
    """What a (rows, width) matrix takes in blocks of that size."""
    return -(-rows // ROWS) * -(-width // block) * _block_bytes(block)


def packed(quantized: NDArray[np.uint8], scales: NDArray[np.float32]) -> Iterator[memoryview]:
    """(N, blocks, block) uint8 and (N * blocks,) float32 -> the bytes, a part after the other."""
    rows, blocks, block = quantized.shape
    scales = scales.reshape(rows, blocks)
    at_once = ROWS * GROUPS_AT_ONCE
    for begin in range(0, rows, at_once):
        numbers, scale = quantized[begin : begin + at_once], scales[begin : begin + at_once]
        if missing := -len(numbers) % ROWS:
            numbers = np.pad(numbers, ((0, missing), (0, 0), (0, 0)), constant_values=ZERO)
            scale = np.pad(scale, ((0, missing), (0, 0)))
        out = np.empty((len(numbers) // ROWS, blocks, _block_bytes(block)), np.uint8)
        fours = numbers.reshape(-1, ROWS, blocks, block // TOGETHER, TOGETHER).view(np.uint32)
        words = out.view(np.uint32)
        of_numbers = words[..., :-ROWS].reshape(len(out), blocks, -1, ROWS, 1)
        of_numbers[...] = fours.transpose(0, 2, 3, 1, 4)
        words[..., -ROWS:].view(np.float32)[...] = scale.reshape(-1, ROWS, blocks).swapaxes(1, 2)
        yield out.reshape(-1).data


def rows_of(
    data: NDArray[np.uint8], ids: NDArray[np.int64], blocks: int, block: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Some rows of what is packed: (T,) -> (T, blocks, block) and (T * blocks,)."""
    words = data.view(np.uint32).reshape(-1, blocks, block // TOGETHER + 1, ROWS)
    group, row = np.divmod(ids, ROWS)
    found = words[group, :, :, row]  # (T, blocks, block/4 + 1)
    numbers = np.ascontiguousarray(found[..., :-1]).view(np.uint8)
    return numbers, found[..., -1].reshape(-1).view(np.float32)


def _block_bytes(block: int) -> int:
    return ROWS * (block + np.dtype(np.float32).itemsize)
