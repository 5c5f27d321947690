"""What a model takes of an instance's memory."""

from __future__ import annotations

import pytest

from scripts.aws.instances import MIB, WORKER_BYTES, model_bytes


@pytest.mark.parametrize(
    ("backend", "precision", "mib"),
    [
        ("mxnet", None, 0.33 * 300),
        ("mxnet", "fp32", 1.1 * 300),
        ("native", None, 0.33 * 300),
        ("native", "int8", 0.33 * 300),
        ("native", "fp32", 1.1 * 300),
    ],
)
def test_the_largest_count_by_the_precision_of_their_weights(
    backend: str, precision: str | None, mib: float
) -> None:
    environment = {"ENGINE_BACKEND": backend}
    if precision is not None:
        environment["ENGINE_PRECISION"] = precision
    sizes = [100 * MIB, 200 * MIB, 400 * MIB]
    found = model_bytes(sizes, 2, environment) - WORKER_BYTES
    assert found == pytest.approx(mib * MIB, abs=1)
