from __future__ import annotations

import numpy as np
import pytest

from engine.backends.onnx.quantize import block_size, dequantize, quantize


@pytest.mark.parametrize(
    ("rows", "width", "block"),
    [(1, 64, 64), (700, 192, 64), (256, 96, 32), (33, 60, 16), (5, 7, 16), (1000, 128, 64)],
)
def test_each_weight_is_wrong_by_half_a_scale_at_most(rows: int, width: int, block: int) -> None:
    weight = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    quantized, scales = quantize(weight, block)
    blocks = -(-width // block)
    assert quantized.shape == (rows, blocks, block)
    assert quantized.dtype == np.uint8
    assert scales.shape == (rows * blocks,)
    assert scales.dtype == np.float32
    error = np.abs(dequantize(quantized, scales, width) - weight)
    scale = np.repeat(scales.reshape(rows, blocks), block, axis=1)[:, :width]
    assert (error <= 0.5001 * scale).all()


def test_the_largest_weight_of_a_block_uses_the_whole_range() -> None:
    weight = np.array([[0.5, -2.0] + [0.0] * 62, [0.0] * 62 + [3.0, 1.0]], dtype=np.float32)
    quantized, scales = quantize(weight)
    assert scales.tolist() == pytest.approx([2 / 127, 3 / 127])
    assert quantized[0, 0, :3].tolist() == [128 + 32, 128 - 127, 128]
    assert quantized[1, 0, -2:].tolist() == [128 + 127, 128 + 42]


def test_zeros_stay_zeros() -> None:
    quantized, scales = quantize(np.zeros((3, 128), dtype=np.float32))
    assert (quantized == 128).all()
    assert (scales == 0).all()


def test_float16_and_read_only_weights_are_taken() -> None:
    weight = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float16)
    weight.flags.writeable = False
    for ours, theirs in zip(quantize(weight), quantize(weight.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("width", "block"),
    [(768, 64), (3072, 64), (192, 64), (96, 32), (48, 16), (60, 16), (7, 16), (128, 64)],
)
def test_the_block_is_the_largest_that_fills_the_width(width: int, block: int) -> None:
    assert block_size(width) == block
