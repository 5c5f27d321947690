"""Halves are packed exactly, int8 as well as it can; the weights of sampling are numpy's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine.native import library
from tests.engine.native.models import KERNELS, pack, rounded


@pytest.fixture(autouse=True)
def _best_kernels() -> Iterator[None]:
    yield
    library.start()


def test_all_halves_are_read_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    packed = pack(halves, False).view(np.float32).reshape(16, 256, 16)  # 16 columns side by side
    unpacked = packed.swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_array_equal(unpacked, halves.astype(np.float32))


def test_a_column_in_int8_takes_all_numbers_that_its_range_can_have() -> None:
    """Columns of both signs, of one, of zeros, and of one number: no step is larger than needed."""
    rng = np.random.default_rng(0)
    columns = rng.uniform(-1, 1, (24, 100)).astype(np.float32)
    columns[1] += np.float32(0.4)
    columns[2], columns[3] = abs(columns[2]), -abs(columns[3])
    columns[4], columns[5] = 0, 0.7
    columns[6, 0] = 1e5
    packed, unpacked = pack(columns, True), np.empty_like(columns)
    library.unpack_int8(packed.ctypes.data, *columns.shape, unpacked.ctypes.data)
    np.testing.assert_allclose(unpacked, rounded(columns), rtol=1e-5, atol=1e-5)
    lowest, highest = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
    step = np.maximum((highest - lowest) / 254, np.maximum(highest, -lowest) / 168)
    assert (np.abs(unpacked - columns).max(axis=1) <= 0.501 * step).all()


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
