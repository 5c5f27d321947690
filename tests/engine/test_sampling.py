"""The next token is chosen as plain definitions over a full sort say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.parameters import Parameters
from engine.sampling import Sampler

VOCAB = 3000
Array = NDArray[Any]


def logits_of(seed: int, size: int = VOCAB, scale: float = 3.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(size)).astype(np.float32)


def softmax(logits: Array) -> Array:
    """(V,) in double precision."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


class Numbers:
    """Stands in for the random numbers: the given ones, and the last again and again."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = [*reversed(numbers)]

    def random(self) -> float:
        return self._numbers.pop() if len(self._numbers) > 1 else self._numbers[0]


def draws(logits: Array, count: int, numbers: Any = (), **parameters: Any) -> list[int]:
    sampler = Sampler(Parameters(do_sample=True, **parameters))
    if len(numbers):
        sampler._random = Numbers(*numbers)  # type: ignore[assignment]
    return [sampler.choose(logits, [])[0] for _ in range(count)]


def greedy(logits: Array, ids: list[int] = [], **parameters: Any) -> Any:  # noqa: B006
    return Sampler(Parameters(**parameters)).choose(logits, ids)


# Greedy and seeds


def test_the_likeliest_token_is_chosen_the_first_of_equal_ones() -> None:
    for seed in range(20):
        logits = logits_of(seed)
        best = int(logits.argmax())
        assert greedy(logits, [1, 2]) == (best, None)
        assert greedy(logits, [best] * 5, repetition_penalty=1.0)[0] == best
        for options in ({"top_k": 1}, {"top_p": 1e-9}):
            assert draws(logits, 5, temperature=5.0, **options) == [best] * 5
    logits = np.zeros(10, dtype=np.float32)
    logits[[3, 7]] = 1
    assert greedy(logits)[0] == 3
    assert draws(logits, 20, top_k=1, seed=1) == [3] * 20


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.8}]
)
def test_the_same_seed_gives_the_same_tokens(options: dict[str, Any]) -> None:
    logits = logits_of(3)
    first = draws(logits, 50, seed=11, **options)
    assert draws(logits, 50, seed=11, **options) == first
    assert draws(logits, 50, seed=12, **options) != first
    assert draws(logits, 50, **options) != draws(logits, 50, **options)
    assert len(set(first)) > 5
    third = Sampler(Parameters(do_sample=True, seed=9, **options), 2)  # of several answers
    assert [third.choose(logits, [])[0] for _ in range(50)] == first


# Draws beside a full sort


def typical(logits: Array, mass: float) -> set[int]:
    """Sort fully: the tokens of transformers' TypicalLogitsWarper, and those equally near."""
    shares = softmax(logits)
    logs = np.log(shares + 1e-300)
    distances = np.abs(logs - (shares * logs).sum())  # to the entropy
    order = np.argsort(distances, kind="stable")
    last = min(int((np.cumsum(shares[order]) < mass).sum()), len(logits) - 1)
    return set(np.flatnonzero(distances <= distances[order[last]] + 1e-5).tolist())


def spreads(size: int = 5000) -> dict[str, NDArray[np.float32]]:
    """Logits with all the ways in which many of them may lie close together."""
    rng = np.random.default_rng(12)
    normal = rng.standard_normal(size)
    found = {
        "flat": np.zeros(size),
        "almost flat": 0.001 * normal,
        "two levels": np.where(np.arange(size) % 2, 0.0, 1e-3),
        "steps": rng.integers(0, 7, size) / 3,
        "an outlier": np.where(np.arange(size) == 77, 4.0, 1e-4 * normal),
        "a low outlier": np.where(np.arange(size) == 77, -1e30, normal),
        "clusters in clusters": -(2.0 ** -rng.integers(0, 100, size)),
        "peaked": 3 * normal,
    }
    return {name: logits.astype(np.float32) for name, logits in found.items()}


@pytest.mark.parametrize("mass", [0.2, 0.9])
@pytest.mark.parametrize("spread", spreads())
def test_however_logits_lie_typical_tokens_are_found(spread: str, mass: float) -> None:
    logits = spreads()[spread]
    assert {*draws(logits, 200, seed=1, typical_p=mass)} <= typical(logits, mass)


@st.composite
def odd_logits(draw: st.DrawFn) -> NDArray[np.float32]:
    """Of any size up to some thousands: flat, peaked, in steps, with many equal ones, the largest
    side by side or far apart."""
    size = draw(st.integers(1, 6000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.standard_normal(size) * draw(st.sampled_from([0.0, 1e-3, 1.0, 3.0, 30.0]))
    if draw(st.booleans()):
        logits = np.round(logits * draw(st.sampled_from([1, 4]))) / 2
    for _ in range(draw(st.integers(0, 2))):
        begin, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 150))
        logits[begin::step][: draw(st.integers(1, 80))] += draw(st.sampled_from([0.5, 7.0, -1e30]))
    return logits.astype(np.float32)


@given(
    odd_logits(),
    st.sampled_from([1e-300, 1e-3, 0.5, 0.8, 1.0, 7.0]),
    st.sampled_from([0, 1, 2, 50, 600, 5999]),
    st.sampled_from([1e-9, 0.3, 0.95, 1 - 1e-9, 1.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_that_of_a_full_sort_whatever_the_logits(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, uniform: float
) -> None:
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    (token,) = draws(logits, 1, [uniform], **options)
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    if top_p == 1.0 and len(order) == len(logits):
        order = np.arange(len(logits))  # nothing is cut off, so nothing is sorted
    shares = softmax(logits[order] / np.float64(max(temperature, 1e-6)))
    through = np.cumsum(shares)
    at = int(np.flatnonzero(order == token)[0])  # it is one of the top k
    assert shares[at] > 0
    before, rounded = through[at] - shares[at], 1e-5
    assert before <= top_p + rounded
    # The candidates reach top_p, and are no more than the token that does.
    ends, until = (
        int(min(np.searchsorted(through, top_p + error), len(order) - 1))
        for error in (-rounded, rounded)
    )
    assert uniform * through[ends] <= through[at] + rounded
    assert before <= uniform * through[until] + rounded


def test_no_draw_is_a_token_without_probability() -> None:
    """Where the sum over all is rounded, the last tokens are not drawn for it."""
    logits = np.full(50_000, -1e30, dtype=np.float32)
    logits[:40_000] = logits_of(1, 40_000, 0.01)
    for options in ({}, {"top_p": 0.9999}, {"top_k": 45_000}):
        assert draws(logits, 1, [1 - 2**-53], **options)[0] < 40_000


# Penalties and biases


@pytest.mark.parametrize("penalty", [1.2, 2.0, 0.5, 100.0, 1e-300])
def test_the_repetition_penalty_makes_seen_tokens_less_likely(penalty: float) -> None:
    rng = np.random.default_rng(5)
    for seed in range(10):
        logits = logits_of(seed, 50) - np.float32(15 * (seed % 2))  # every other time all negative
        ids = [int(i) for i in rng.integers(0, 50, 30)]
        expected = logits.astype(np.float64)
        for token in set(ids):
            expected[token] *= 1 / penalty if expected[token] > 0 else penalty
        before = logits.copy()
        assert greedy(logits, ids, repetition_penalty=penalty)[0] == int(expected.argmax())
        np.testing.assert_array_equal(logits, before)  # the backend's array is left as it is


def test_the_repetition_penalty_knows_what_was_chosen_since() -> None:
    sampler, ids = Sampler(Parameters(repetition_penalty=1.3)), [3, 3, 5]
    for seed in range(30):
        logits = logits_of(seed, 40)
        found = sampler.choose(logits, ids)
        assert found == greedy(logits, list(ids), repetition_penalty=1.3)
        ids.append(found[0])
    assert len(set(ids)) > 10


def test_a_penalty_works_with_sampling_of_every_kind() -> None:
    logits = np.array([9, 8, -100, -100], dtype=np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}):
        sampler = Sampler(Parameters(do_sample=True, repetition_penalty=90.0, seed=1, **options))
        assert {sampler.choose(logits, [0])[0] for _ in range(50)} == {1}


def test_penalties_count_the_tokens_of_the_answer_and_not_of_the_prompt() -> None:
    rng = np.random.default_rng(6)
    sampler = Sampler(Parameters(frequency_penalty=0.7, presence_penalty=-0.4))
    answer = np.zeros(8)
    for _ in range(60):
        logits = rng.standard_normal(8).astype(np.float32)
        expected = logits - 0.7 * answer + 0.4 * (answer > 0)
        before = logits.copy()
        token, _ = sampler.choose(logits, [0, 0, 0, 1])
        sampler.accept(token)
        assert token == int(expected.argmax())
        np.testing.assert_array_equal(logits, before)
        answer[token] += 1
    assert answer.max() > 1


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}])
def test_biases_forbid_and_force_tokens_and_change_no_logprobs(options: dict[str, Any]) -> None:
    logits = np.array([3, 2, 1, 0], dtype=np.float32)
    token, found = greedy(logits, logit_bias=((2, 100.0),), logprobs=4, **options)
    assert (token, found.top[0][0]) == (2, 0)
    assert found.chosen == pytest.approx(np.log(softmax(logits))[2], abs=1e-4)
    without = Sampler(Parameters(logit_bias=((0, -100.0), (1, -100.0)), **options))
    assert {without.choose(logits, [])[0] for _ in range(50)} <= {2, 3}


# Log-probabilities


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("top", [0, 2, 5])
def test_logprobs_are_those_of_the_model_and_not_of_the_sampling(scale: float, top: int) -> None:
    drawing = {"do_sample": True, "seed": 3, "temperature": 9.0, "top_k": 50}
    for seed in range(5):
        logits = logits_of(seed, scale=scale)
        expected = np.log(softmax(logits) + 1e-300)
        best = np.argsort(-logits)[:top]
        for options in ({}, {**drawing, "repetition_penalty": 2.0}):
            token, found = greedy(logits, [int(logits.argmax())], logprobs=top, **options)
            assert found.chosen == pytest.approx(expected[token], abs=1e-4)
            assert [i for i, _ in found.top] == best.tolist()
            np.testing.assert_allclose([p for _, p in found.top], expected[best], atol=1e-4)
