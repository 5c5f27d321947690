"""MXNet's operator of a pass is the library's pass."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InvalidRequest
from tests.engine.native.models import SHAPES, NativeModel, random_weights
from tests.lazy import mxnet_operator

IDS = np.random.default_rng(0).integers(0, SHAPES[0].vocab, 60).tolist()


def test_the_operator_gives_the_same_bits_as_the_library() -> None:
    weights = random_weights(SHAPES[0])
    direct = NativeModel(SHAPES[0], weights, 64)
    by_operator = NativeModel(SHAPES[0], weights, True, run_pass=mxnet_operator.run_pass)
    passes = [
        [(IDS, range(4), 0, 60), (IDS[30:], range(4, 8), 0, 2)],
        [(IDS[:1], range(4), 60, 1), (IDS[3:8], range(4, 8), 30, 0)],
        [],
        [([i], [8 + i], 0, 1) for i in range(200)],  # more pieces than there is space for at first
    ]
    direct.arena = np.zeros(208 * direct.page_bytes, np.uint8)
    by_operator.arena = np.ones_like(direct.arena)
    for parts in passes:
        assert direct.run(parts).tobytes() == by_operator.run(parts).tobytes()


def test_the_operator_raises_the_errors_of_the_library() -> None:
    model = NativeModel(SHAPES[0], random_weights(SHAPES[0]), run_pass=mxnet_operator.run_pass)
    with pytest.raises(InvalidRequest, match="a piece's tokens or positions are out of range"):
        model.run([([1, -1], [0], 0, 1)])
    assert np.isfinite(model.run([([1, 1], [0], 0, 1)])).all()
    model.struct.units = -1
    with pytest.raises(InvalidRequest, match="the model's sizes are out of range"):
        model.run([([1], [0], 0, 1)])


def test_arrays_of_models_that_are_gone_do_no_harm() -> None:
    """Their addresses may be another model's, or nothing's, by then."""
    weights = random_weights(SHAPES[0])
    wanted = NativeModel(SHAPES[0], weights).run([(IDS, range(4), 0, 1)])
    for _ in range(20):
        model = NativeModel(SHAPES[0], weights, run_pass=mxnet_operator.run_pass)
        assert model.run([(IDS, range(4), 0, 1)]).tobytes() == wanted.tobytes()
