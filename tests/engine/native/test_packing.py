"""All halves are packed exactly, and the weights of sampling are numpy's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine.native import library
from tests.engine.native.models import KERNELS, pack


@pytest.fixture(autouse=True)
def _best_kernels() -> Iterator[None]:
    yield
    library.start()


def test_all_halves_are_read_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    packed = pack(halves, False).view(np.float32).reshape(16, 256, 16)  # 16 columns side by side
    unpacked = packed.swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_array_equal(unpacked, halves.astype(np.float32))


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
