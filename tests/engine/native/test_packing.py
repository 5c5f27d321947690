"""Matrices are packed as numpy would do it, and the weights of sampling are numpy's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine.native import library
from tests.engine.native.models import KERNELS, Floats, pack, rounded

SIZES = [(1, 1), (16, 64), (33, 100), (20, 768), (48, 63)]


@pytest.fixture(autouse=True)
def _best_kernels() -> Iterator[None]:
    yield
    library.start()


def unpack(packed: np.ndarray, n: int, k: int, block: int) -> Floats:
    """The matrix (n, k) of packed bytes, by the layout that product.h describes."""
    groups = -(-n // 16)
    if not block:
        numbers = packed.view(np.float32).reshape(groups, k, 16)
        return numbers.swapaxes(1, 2).reshape(-1, k)[:n]
    blocks = packed.reshape(groups, -(-k // block), 16 * (block + 4))
    numbers = (
        blocks[..., : 16 * block].reshape(groups, -1, block // 4, 16, 4).astype(np.int32) - 128
    )
    scales = np.ascontiguousarray(blocks[..., 16 * block :]).view(np.float32)
    values = numbers * scales[:, :, None, :, None]
    return values.transpose(0, 3, 1, 2, 4).reshape(groups * 16, -1)[:n, :k]


def given(weight: Floats, dtype: str) -> tuple[np.ndarray, Floats]:
    """A matrix as `pack` takes it, and its exact numbers."""
    if dtype != "bfloat16":
        return weight.astype(dtype), weight.astype(dtype).astype(np.float32)
    bits = weight.view(np.uint32) & 0xFFFF0000
    return (bits >> 16).astype(np.uint16), bits.view(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block", [0, 32, 64])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_packing_is_that_of_numpy(n: int, k: int, block: int, dtype: str) -> None:
    weight, exact = given(np.random.default_rng(0).standard_normal((n, k), dtype="f4"), dtype)
    packed = pack(weight, block)
    # A number in the midst between two may be rounded to either: 1 of 127.
    exactness = 0 if not block else 1.01 / 127 * np.abs(exact).max()
    assert np.abs(unpack(packed, n, k, block) - exact).max() <= exactness / 2
    assert np.mean(np.abs(unpack(packed, n, k, block) - rounded(exact, block)) > 1e-6) < 1e-3
    transposed, shifted = np.asfortranarray(weight), np.tile(weight, (1, 2))[:, :k]
    assert not transposed.flags.c_contiguous or 1 in (n, k)
    assert pack(transposed, block).tobytes() == packed.tobytes() == pack(shifted, block).tobytes()


def test_all_halves_are_read_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    unpacked = unpack(pack(halves, 0), 256, 256, 0)
    np.testing.assert_array_equal(unpacked, halves.astype(np.float32))


def test_a_block_of_zeros_stays_zeros() -> None:
    weight = np.zeros((16, 128), np.float32)
    weight[:, 64:] = 1
    unpacked = unpack(pack(weight, 64), 16, 128, 64)
    assert (unpacked[:, :64] == 0).all()
    np.testing.assert_allclose(unpacked, weight, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("count", [1, 15, 500, 50001])
@pytest.mark.parametrize("kernels", KERNELS)
def test_sampling_weights_are_those_of_numpy(kernels: str, count: int, temperature: float) -> None:
    library.use_kernels(kernels)
    logits = 5 * np.random.default_rng(0).standard_normal(count + 1, dtype=np.float32)[1:]
    weights = np.full(count + 1, -1, np.float32)
    total = library.softmax_weights(logits.ctypes.data, count, temperature, weights.ctypes.data)
    exact = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    np.testing.assert_allclose(weights[:count], exact, rtol=1e-5, atol=1e-37)
    assert total == pytest.approx(exact.sum(), rel=1e-6)
    assert weights[count] == -1
