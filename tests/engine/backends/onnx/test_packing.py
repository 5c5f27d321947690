"""Int8MatMul: packed as it reads, exact within a block, and for each row what it is alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException

from common import onnx_session
from engine.backends.onnx import packing
from engine.backends.onnx.quantize import MAX, ZERO, block_size, dequantize, quantize

Floats = NDArray[np.float32]

KERNELS = ("vnni", "avx2", "plain")
# Rows and columns: whole groups and a rest, a width of several blocks, of smaller ones, of none.
SIZES = ((48, 128), (50, 768), (3, 192), (17, 96), (33, 60), (16, 16), (1, 4))
COUNTS = (1, 2, 3, 4, 7, 8, 12, 13, 31)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the sets of instructions that this processor has."""
    use = ctypes.CDLL(str(packing.library())).use_kernels
    use.restype, use.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    name: str = request.param
    session(np.ones((1, 4), np.float32), None)  # so that the best is not chosen after ours
    if use(name.encode()) is None:
        pytest.skip(f"this processor has no {name}")
    yield name
    assert use(None)


def weights(rows: int, width: int) -> Floats:
    rng = np.random.default_rng(rows * width)
    w: Floats = rng.standard_normal((rows, width), dtype=np.float32)
    w[0, : width // 2] = 0  # a block of zeros
    return w


def packed(w: Floats) -> NDArray[np.uint8]:
    parts = packing.packed(*quantize(w, block_size(w.shape[1])))
    return np.concatenate([np.asarray(part) for part in parts])


def session(w: Floats, bias: Floats | None, *, residual: bool = False, **changed: Any) -> Any:
    attributes = {"N": len(w), "block_size": block_size(w.shape[1])} | changed
    given = {"packed": packed(w)} | ({} if bias is None else {"bias": bias})
    names = ["x", "packed", "bias" if "bias" in given else "", *(["residual"] if residual else [])]
    node = helper.make_node("Int8MatMul", names, ["y"], domain="kogpt2", **attributes)
    info = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=None)
    inputs = [info(name) for name in ("x", "residual") if name in names]
    tensors = [numpy_helper.from_array(array, name) for name, array in given.items()]
    graph = helper.make_graph([node], "product", inputs, [info("y")], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("kogpt2", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnx_session.session_options()
    options.register_custom_ops_library(str(packing.library()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def product(opened: Any, x: Floats, **others: Floats) -> Floats:
    y: Floats = opened.run(None, {"x": x, **others})[0]
    return y


def rounded(x: Floats, block: int) -> NDArray[np.float64]:
    """What remains of x when it is quantized in blocks."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(MAX)
    numbers = np.rint(blocks / np.where(scale > 0, scale, 1))
    return (numbers * scale).reshape(len(x), -1)[:, : x.shape[1]].astype(np.float64)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_are_found_again_in_what_is_packed(size: tuple[int, int]) -> None:
    w, block = weights(*size), block_size(size[1])
    data = packed(w)
    assert len(data) == packing.num_bytes(*size, block)
    quantized, scales = quantize(w, block)
    ids = np.array([0, size[0] - 1, size[0] // 2, 0])
    numbers, found = packing.rows_of(data, ids, quantized.shape[1], block)
    np.testing.assert_array_equal(numbers, quantized[ids])
    np.testing.assert_array_equal(found.reshape(len(ids), -1), scales.reshape(size[0], -1)[ids])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_product_is_that_of_what_is_quantized_and_of_a_row_what_it_is_alone(
    kernels: str, size: tuple[int, int]
) -> None:
    w, (rows, width) = weights(*size), size
    bias = np.linspace(-1, 1, rows, dtype=np.float32)
    x = np.random.default_rng(1).standard_normal((max(COUNTS), width), dtype=np.float32)
    x[5] = 0
    block = block_size(width)
    exact = rounded(x, block) @ dequantize(*quantize(w, block), width).astype(np.float64).T
    for given in (bias, None):
        opened = session(w, given)
        all_rows = product(opened, x)
        expected = exact if given is None else exact + given
        # A number of x half-way between two may go either way.
        np.testing.assert_allclose(all_rows, expected, atol=0.01 * np.sqrt(width))
        assert np.median(np.abs(all_rows - expected)) < 1e-5
        for count in COUNTS:
            np.testing.assert_array_equal(product(opened, x[:count]), all_rows[:count])
        np.testing.assert_array_equal(product(opened, x[None, 3:9]), all_rows[None, 3:9])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_residual_is_added(kernels: str, size: tuple[int, int]) -> None:
    w, (rows, width) = weights(*size), size
    rng = np.random.default_rng(2)
    for shape in ((1,), (13,), (3, 2)):
        x = rng.standard_normal((*shape, width), dtype=np.float32)
        residual = rng.standard_normal((*shape, rows), dtype=np.float32)
        for bias in (np.linspace(-1, 1, rows, dtype=np.float32), None):
            found = product(session(w, bias, residual=True), x, residual=residual)
            np.testing.assert_array_equal(found, product(session(w, bias), x) + residual)


def test_the_largest_numbers_do_not_overflow(kernels: str) -> None:
    w = np.ones((20, 256), np.float32)
    w[1::2] = -1
    x = np.ones((5, 256), np.float32)
    x[1] = -1
    expected = x @ w.T
    np.testing.assert_allclose(product(session(w, None), x), expected, rtol=1e-6)
    assert quantize(w)[0].max() == ZERO + MAX


def test_no_rows_have_no_product(kernels: str) -> None:
    opened = session(weights(50, 768), None)
    assert product(opened, np.zeros((0, 768), np.float32)).shape == (0, 50)


def test_what_is_not_a_number_is_none_in_its_own_row_only(kernels: str) -> None:
    opened = session(weights(50, 768), None)
    x = np.ones((9, 768), np.float32)
    expected = product(opened, x)
    x[4, 700] = np.nan
    found = product(opened, x)
    assert np.isnan(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(expected, 4, 0))


def test_other_sizes_than_those_that_are_packed_are_refused() -> None:
    w = weights(48, 128)
    for x in (np.zeros((1, 64), np.float32), np.zeros((), np.float32)):
        with pytest.raises(Fail, match="Int8MatMul"):
            product(session(w, None), x)
    for changed in ({"N": 0}, {"block_size": 6}, {"block_size": 128}):
        with pytest.raises(RuntimeException, match="N or block_size"):
            session(w, None, **changed)
    with pytest.raises(Fail, match="packed is not of"):
        product(session(w, None, N=64), np.zeros((1, 128), np.float32))
    x, residual = np.zeros((2, 128), np.float32), np.zeros((1, 48), np.float32)
    with pytest.raises(Fail, match="bias or residual"):
        product(session(w, None, residual=True), x, residual=residual)
    with pytest.raises(Fail, match="bias or residual"):
        product(session(w, residual[0, 1:]), x)
