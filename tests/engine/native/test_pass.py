"""A pass gives the logits of GPT-2, and a token's are the same bits whatever is beside it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.errors import InvalidRequest
from engine.native import library, rotation
from tests.engine.native import models
from tests.engine.native.models import (
    KERNELS,
    SHAPES,
    NativeModel,
    Part,
    Shape,
    as_rounded,
    random_weights,
    reference,
)

SMALL = Shape(2, 40, 5, 72, 200, 90)
PRECISIONS = pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
PAGES = [5, 3, 7, 1, 6, 0]  # of SMALL's longest row


@pytest.fixture(autouse=True)
def _best_kernels() -> Iterator[None]:
    yield
    library.start()


def error(logits: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Root mean square of the difference, over the deviation of what is wanted."""
    return float(np.sqrt(np.mean((logits - wanted) ** 2)) / np.std(wanted))


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.tobytes() == b.tobytes()


@functools.cache
def random_ids(shape: Shape, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, shape.vocab, shape.max_length).tolist()
    return ids


@functools.cache
def small(int8: bool) -> NativeModel:
    return NativeModel(SMALL, random_weights(SMALL), int8)


@functools.cache
def rows(kernels: str, int8: bool) -> list[tuple[list[int], NDArray[Any]]]:
    """Three rows, and the logits of all their tokens, each row computed alone in one pass."""
    library.use_kernels(kernels)
    library.use_threads(1)
    found = []
    for seed, length in enumerate((90, 90, 47)):
        ids = random_ids(SMALL, seed)[:length]
        found.append((ids, small(int8).run([(ids, PAGES, 0, length)]).copy()))
    return found


# Against numpy


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_fp32_is_exact_to_single_precision(kernels: str, shape: Shape, tanh: bool) -> None:
    library.use_kernels(kernels)
    weights, ids = random_weights(shape), random_ids(shape)
    logits = NativeModel(shape, weights, tanh=tanh).run([(ids, range(8), 0, len(ids))])
    wanted = reference(shape, weights, ids, tanh=tanh)
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()


# What is left is the error of keys and values in int8; the weights' is in the reference, too.
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_int8_is_exact_but_for_rounding(kernels: str, shape: Shape) -> None:
    library.use_kernels(kernels)
    weights, ids = random_weights(shape), random_ids(shape)
    weights["0 up"][0] = 0  # a column without a scale
    logits = NativeModel(shape, weights, True).run([(ids, range(8), 0, len(ids))])
    assert error(logits, reference(shape, as_rounded(shape, weights), ids)) < 0.03
    assert error(logits, reference(shape, weights, ids)) < 0.05


def test_a_rotated_model_is_the_same_but_for_rounding() -> None:
    for shape in SHAPES:
        weights, ids = random_weights(shape), random_ids(shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "rounded", lambda weight: weight)
            back = as_rounded(shape, weights)
        assert error(reference(shape, back, ids), reference(shape, weights, ids)) < 1e-5


def test_outliers_cost_int8_nothing() -> None:
    """Channels a hundred times larger than others, which cancel: the model computes the same."""
    shape = SHAPES[0]
    weights, ids = random_weights(shape), random_ids(shape)
    wanted = reference(shape, weights, ids)
    plain = error(NativeModel(shape, weights, True).run([(ids, range(8), 0, len(ids))]), wanted)
    for i in range(shape.layers):
        for norm, product in (("attention norm", "qkv"), ("ffn norm", "up")):
            weights[f"{i} {norm}"][:, 5] *= 100
            weights[f"{i} {product}"][:, 5] /= 100
    assert error(reference(shape, weights, ids), wanted) < 1e-5
    hard = error(NativeModel(shape, weights, True).run([(ids, range(8), 0, len(ids))]), wanted)
    assert hard < 1.1 * plain


def test_all_kernels_with_fused_sums_give_the_same_bits_in_int8() -> None:
    """Sums over many products are integers, and the rest has one order."""
    fused = [name for name in KERNELS if name != "plain"]
    first, *others = [rows(name, True)[0][1] for name in fused]
    assert all(same_bits(first, logits) for logits in others)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("n", [1, 2, 3, 12, 30, 64, 77, 768])
def test_a_rotation_is_orthogonal_and_its_own_inverse(kernels: str, n: int) -> None:
    library.use_kernels(kernels)
    matrix = np.eye(n, dtype=np.float32)
    rotation.rotate_rows(matrix, n)
    wide = matrix.astype(np.float64)
    np.testing.assert_allclose(wide @ wide.T, np.eye(n), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    columns = np.eye(n, dtype=np.float32)
    rotation.rotate_columns(columns, n)
    assert same_bits(columns, matrix)
    library.use_kernels("plain")
    again = np.eye(n, dtype=np.float32)
    rotation.rotate_rows(again, n)
    assert same_bits(matrix, again)
    if n == 768:
        assert np.abs(matrix).max() < 0.05  # a channel is spread over all


# The law


@PRECISIONS
@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=30)
@given(
    passes=st.lists(
        st.lists(
            st.tuples(st.sampled_from(range(3)), st.integers(1, 70)), unique_by=lambda p: p[0]
        ),
        max_size=6,
    ),
    threads=st.sampled_from([1, 2, 3]),
)
def test_a_token_is_the_same_alone_among_others_and_cut_anywhere(
    kernels: str, int8: bool, passes: list[list[tuple[int, int]]], threads: int
) -> None:
    """Three rows in random pieces; what the passes leave of a row comes at once at the end."""
    wanted = rows(kernels, int8)
    library.use_kernels(kernels)
    library.use_threads(threads)
    done = [0, 0, 0]
    last = [[(row, 1) for row in range(3)], [(row, 90) for row in (2, 0, 1)]]
    for pieces in [*passes, *last]:
        parts: list[Part] = []
        expected = []
        for row, count in pieces:
            ids, logits = wanted[row]
            begin, end = done[row], min(done[row] + count, len(ids))
            if begin < end:
                pages = [8 * row + page for page in PAGES]
                wants = min(count, end - begin)
                parts.append((ids[begin:end], pages, begin, wants))
                expected.append(logits[end - wants : end])
                done[row] = end
        if parts:
            assert same_bits(small(int8).run(parts), np.concatenate(expected))
    assert done == [90, 90, 47]


@PRECISIONS
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_share_the_pages_of_a_common_prefix(kernels: str, int8: bool) -> None:
    library.use_kernels(kernels)
    model = small(int8)
    prefix, first, second = random_ids(SMALL)[:32], [7, 8, 9], [150, 3, 77, 21]
    wanted = [model.run([(prefix + rest, PAGES, 0, len(rest))]) for rest in (first, second)]
    model.run([(prefix, [4, 6], 0, 0)])
    shared = model.run([(first, [4, 6, 10], 32, 3), (second, [4, 6, 11], 32, 4)])
    assert same_bits(shared, np.concatenate(wanted))


@PRECISIONS
@pytest.mark.parametrize("kernels", KERNELS)
def test_guesses_that_were_wrong_are_overwritten(kernels: str, int8: bool) -> None:
    ids, wanted = rows(kernels, int8)[0]
    library.use_kernels(kernels)
    model = small(int8)
    model.run([(ids[:20], PAGES, 0, 0)])
    wrong = [(token + 1) % SMALL.vocab for token in ids[21:25]]
    assert same_bits(model.run([([ids[20], *wrong], PAGES, 20, 5)])[0], wanted[20])
    assert same_bits(model.run([(ids[21:60], PAGES, 21, 39)]), wanted[21:60])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@PRECISIONS
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_number_that_is_not_finite_reaches_no_other_token(
    kernels: str, int8: bool, value: float
) -> None:
    """It comes at position 40: tokens before it and rows that end before it are as without it."""
    wanted = rows(kernels, int8)
    library.use_kernels(kernels)
    weights = random_weights(SMALL)
    weights["positions"][40, 17] = value
    model = NativeModel(SMALL, weights, int8)
    (long, one), (short, two) = wanted[0], wanted[1]
    logits = model.run([(short[:30], range(10, 13), 0, 30), (long, PAGES, 0, 90)])
    assert same_bits(logits[:70], np.concatenate((two[:30], one[:40])))
    assert same_bits(model.run([(short[30:33], range(10, 13), 30, 3)]), two[30:33])


def test_kernels_that_the_processor_lacks_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="has no mmx instructions"):
        library.use_kernels("mmx")
