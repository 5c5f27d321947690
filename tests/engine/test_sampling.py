"""The next token is chosen as plain definitions over a full sort say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.parameters import Parameters
from engine.sampling import FEW, Sampler, top_indices

VOCAB = 3000
Array = NDArray[Any]


def logits_of(seed: int, size: int = VOCAB, scale: float = 3.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(size)).astype(np.float32)


def softmax(logits: Array) -> Array:
    """(V,) in double precision."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    found: Array = weights / weights.sum()
    return found


def draws(logits: NDArray[np.float32], count: int, **parameters: Any) -> list[int]:
    sampler = Sampler(Parameters(do_sample=True, **parameters))
    return [sampler.choose(logits, [])[0] for _ in range(count)]


def test_without_sampling_the_likeliest_token_is_chosen() -> None:
    for seed in range(20):
        logits = logits_of(seed)
        assert Sampler(Parameters()).choose(logits, [1, 2]) == (int(logits.argmax()), None)


def test_greedy_choices_take_the_first_of_equal_tokens() -> None:
    logits = np.zeros(10, dtype=np.float32)
    logits[[3, 7]] = 1
    assert Sampler(Parameters()).choose(logits, [])[0] == 3
    assert draws(logits, 20, top_k=1, seed=1) == [3] * 20


def test_top_k_of_one_is_greedy() -> None:
    for seed in range(20):
        logits = logits_of(seed)
        assert draws(logits, 5, top_k=1, temperature=5.0) == [int(logits.argmax())] * 5


def test_a_tiny_top_p_is_greedy() -> None:
    for seed in range(20):
        logits = logits_of(seed)
        assert draws(logits, 5, top_p=1e-9, temperature=5.0) == [int(logits.argmax())] * 5


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 10}, {"top_k": 9, "top_p": 0.5}])
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float, options: dict[str, Any]) -> None:
    logits = logits_of(1)
    found = draws(logits, 5, temperature=temperature, **options)
    assert found == [int(logits.argmax())] * 5


def test_the_same_seed_gives_the_same_tokens() -> None:
    options: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.8}]
    for option in options:
        logits = logits_of(3)
        first = draws(logits, 50, seed=11, **option)
        assert draws(logits, 50, seed=11, **option) == first
        assert draws(logits, 50, seed=12, **option) != first
        assert len(set(first)) > 5


def test_the_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    logits = logits_of(4)
    for index in range(3):
        one = Sampler(Parameters(do_sample=True, seed=5), index)
        other = Sampler(Parameters(do_sample=True, seed=5 + index))
        assert [one.choose(logits, []) for _ in range(20)] == [
            other.choose(logits, []) for _ in range(20)
        ]


def test_without_a_seed_every_answer_differs() -> None:
    logits = logits_of(4)
    assert draws(logits, 30) != draws(logits, 30)


def nucleus(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[int]:
    """By a full sort: the top k, of these the fewest that together reach top_p, and of these the
    ones that transformers' MinPLogitsWarper keeps."""
    order = np.argsort(-logits, kind="stable")[: top_k or len(logits)]
    probabilities = softmax(logits[order] / temperature)
    reached = np.cumsum(probabilities) >= top_p
    count = int(reached.argmax()) + 1 if reached.any() else len(order)
    kept = probabilities[:count] >= min_p * probabilities[0]
    return [int(i) for i in order[:count][kept]]


class EvenlySpaced:
    """Stands in for the random numbers: one for each small part of [0, 1)."""

    def __init__(self, count: int) -> None:
        self._numbers = iter((np.arange(count) + 0.5) / count)

    def random(self) -> float:
        return float(next(self._numbers))


@pytest.mark.parametrize(
    ("scale", "temperature", "top_k", "top_p", "min_p"),
    [
        (4.0, 1.0, 0, 0.5, 0.0),
        (4.0, 1.0, 0, 0.9, 0.0),
        (4.0, 0.5, 0, 0.95, 0.0),
        (2.0, 1.5, 0, 0.3, 0.0),
        (0.5, 1.0, 0, 0.2, 0.0),  # flat: more candidates than one partition finds
        (4.0, 1.0, 20, 1.0, 0.0),
        (4.0, 2.0, 20, 0.7, 0.0),
        (4.0, 1.0, 10_000, 0.6, 0.0),
        (4.0, 1.0, 0, 1.0, 0.0),
        (4.0, 1.0, 0, 1.0, 0.1),
        (4.0, 2.0, 20, 1.0, 0.3),
        (2.0, 0.7, 0, 0.8, 0.2),
        (0.5, 1.0, 0, 0.9, 0.3),
        (4.0, 1.5, 30, 0.9, 0.5),
        (4.0, 1.0, 0, 1.0, 1.0),
    ],
)
def test_candidates_and_their_shares_are_those_of_a_full_sort(
    scale: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    count, vocab = 1500, 400
    for seed in range(3):
        logits = logits_of(seed, vocab, scale)
        expected = nucleus(logits, temperature, top_k, top_p, min_p)
        parameters = Parameters(
            do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=0
        )
        sampler = Sampler(parameters)
        sampler._random = EvenlySpaced(count)  # type: ignore[assignment]
        drawn = np.bincount([sampler.choose(logits, [])[0] for _ in range(count)], minlength=vocab)

        shares = np.zeros(vocab)
        shares[expected] = softmax(logits[expected] / temperature)
        # Each token gets its share of the evenly spaced numbers, but for one at either end.
        assert np.abs(drawn - shares * count).max() <= 1.01
        outside = np.setdiff1d(np.arange(vocab), expected)
        assert drawn[outside].sum() == 0
        inside = np.array(expected)
        assert drawn[inside[shares[inside] * count > 2]].min() >= 1


def spreads(size: int = 5000) -> dict[str, NDArray[np.float32]]:
    """Of logits, with all the ways in which many of them may lie close together."""
    rng = np.random.default_rng(12)
    normal = rng.standard_normal(size)
    return {
        "flat": np.zeros(size),
        "almost flat": 0.001 * normal,
        "two levels": np.where(np.arange(size) % 2, 0.0, 1e-3),
        "steps": rng.integers(0, 7, size) / 3,
        "an outlier": np.where(np.arange(size) == 77, 4.0, 1e-4 * normal),
        "a low outlier": np.where(np.arange(size) == 77, -1e30, normal),
        "clusters in clusters": -(2.0 ** -rng.integers(0, 100, size)),
        "peaked": 3 * normal,
    }


def typical(
    logits: Array, kept: list[int], temperature: float, mass: float, rounded: float = 1e-12
) -> list[int]:
    """By a full sort: of the tokens that other parameters kept, those that transformers'
    TypicalLogitsWarper keeps."""
    shifted = (logits[kept].astype(np.float64) - logits[kept].max()) / temperature
    logs = shifted - np.log(np.exp(shifted).sum())
    distances = np.abs(-logs + (np.exp(logs) * logs).sum())  # to the entropy
    order = np.argsort(distances, kind="stable")
    last = min(int((np.cumsum(np.exp(logs[order])) < mass).sum()), len(kept) - 1)
    return [kept[i] for i in np.flatnonzero(distances <= distances[order[last]] + rounded)]


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 9.0])
@pytest.mark.parametrize("mass", [0.05, 0.3, 0.9003, 0.99])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.5},
        {"top_k": 40},
        {"top_k": 2000},
        {"top_p": 0.8003},
        {"min_p": 0.03},
        {"top_k": 1500, "top_p": 0.9503, "min_p": 0.01, "temperature": 0.8},
    ],
)
def test_typical_tokens_are_those_of_a_full_sort(
    options: dict[str, Any], mass: float, scale: float
) -> None:
    count = 400
    logits = logits_of(21, scale=scale)
    order = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    kept = typical(logits, nucleus(logits, **order), order["temperature"], mass)
    sampler = Sampler(Parameters(do_sample=True, seed=0, typical_p=mass, **options))
    sampler._random = EvenlySpaced(count)  # type: ignore[assignment]
    drawn = np.bincount([sampler.choose(logits, [])[0] for _ in range(count)], minlength=VOCAB)
    shares = np.zeros(VOCAB)
    shares[kept] = softmax(logits[kept] / order["temperature"])
    # A token at the edge may be in or out, as single precision rounds its distance.
    assert np.abs(drawn - shares * count).max() <= 1.01 + count * shares.max() * 0.01
    assert drawn[np.setdiff1d(np.arange(VOCAB), kept)].sum() <= 1


@pytest.mark.parametrize("mass", [0.2, 0.9])
@pytest.mark.parametrize("spread", spreads())
def test_however_logits_lie_typical_tokens_are_found_and_few_sorted(
    spread: str, mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = spreads()[spread].astype(np.float32)
    near = typical(logits, list(range(len(logits))), 1.0, mass, rounded=1e-5)
    sizes: list[int] = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda a, **how: sizes.append(len(a)) or argsort(a, **how))
    assert set(draws(logits, 200, seed=1, typical_p=mass)) <= set(near)
    assert max(sizes, default=0) <= FEW


def test_typical_tokens_are_not_the_likeliest() -> None:
    """One of 0.5 and many alike: these are what is typical."""
    logits = np.log(np.array([0.5, *[0.5 / 50] * 50])).astype(np.float32)
    assert 0 not in draws(logits, 200, seed=1, typical_p=0.3)
    assert 0 in draws(logits, 200, seed=1)
    one = np.log(np.array([0.98, *[0.02 / 50] * 50])).astype(np.float32)
    assert set(draws(one, 200, seed=1, typical_p=0.3)) == {0}


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9003},
        {"top_k": 3000},
        {"top_k": 900, "top_p": 0.3005},
        {"top_p": 0.9003, "min_p": 0.5},
    ],
)
@pytest.mark.parametrize("spread", spreads())
def test_however_logits_lie_a_draw_is_that_of_a_full_sort_and_sorts_few(
    spread: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores 16 rows of 50,000 flat logits with top_p took 57 ms, almost flat ones 153; now
    1.6 and 5 (`time.thread_time` around 16 calls of `choose`)."""
    logits = spreads()[spread].astype(np.float32)
    kept = nucleus(logits, 1.0, **{"top_k": 0, "top_p": 1.0, **options})
    edges = np.cumsum(softmax(logits)[kept])
    count = 400
    sampler = Sampler(Parameters(do_sample=True, seed=0, **options))
    sampler._random = EvenlySpaced(count)  # type: ignore[assignment]
    sizes: list[int] = []
    argsort = np.argsort
    with monkeypatch.context() as patch:
        patch.setattr(np, "argsort", lambda a, **how: sizes.append(len(a)) or argsort(a, **how))
        drawn = [sampler.choose(logits, [])[0] for _ in range(count)]
    assert max(sizes, default=0) <= FEW
    for i, token in enumerate(drawn):
        mass = (i + 0.5) / count * edges[-1]
        near = (np.abs(edges - mass) < 1e-9).any()  # sums are rounded in another order
        at = int(np.searchsorted(edges, mass, side="right"))
        assert token == kept[at] or near


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
    parameters = Parameters(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, seed=0
    )
    sampler = Sampler(parameters)
    sampler._random = Always(uniform)  # type: ignore[assignment]
    token, _ = sampler.choose(logits, [])

    temperature = max(temperature, 1e-6)
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    if top_p == 1.0 and len(order) == len(logits):
        order = np.arange(len(logits))  # nothing is cut off, so nothing is sorted
    shares = softmax(logits[order] / np.float64(temperature))
    through = np.cumsum(shares)
    at = int(np.flatnonzero(order == token)[0])  # it is one of the top k
    assert shares[at] > 0
    before, rounded = through[at] - shares[at], 1e-5
    assert before <= top_p + rounded
    # What is kept reaches top_p, and no more than the token that does.
    ends = int(min(np.searchsorted(through, top_p - rounded), len(order) - 1))
    until = int(min(np.searchsorted(through, top_p + rounded), len(order) - 1))
    assert uniform * through[ends] <= through[at] + rounded
    assert before <= uniform * through[until] + rounded


class Always:
    """Stands in for the random numbers: always the same one."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number


def test_no_draw_is_a_token_without_probability() -> None:
    """Where the sum over all is rounded, the last tokens are not drawn for it."""
    logits = np.full(50_000, -1e30, dtype=np.float32)
    logits[:40_000] = logits_of(1, 40_000, 0.01)
    for options in ({}, {"top_p": 0.9999}, {"top_k": 45_000}):
        sampler = Sampler(Parameters(do_sample=True, seed=0, **options))
        sampler._random = Always(1 - 2**-53)  # type: ignore[assignment]
        assert sampler.choose(logits, [])[0] < 40_000


def test_twenty_thousand_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.08, 0.02])).astype(np.float32)
    found = np.bincount(draws(logits, 20_000, seed=1), minlength=5) / 20_000
    np.testing.assert_allclose(found, [0.5, 0.25, 0.15, 0.08, 0.02], atol=0.012)  # > 3 sigma


def test_temperature_divides_the_logits() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5], dtype=np.float32)
    found = np.bincount(draws(logits, 20_000, seed=2, temperature=2.0), minlength=5) / 20_000
    np.testing.assert_allclose(found, softmax(logits / 2), atol=0.012)


@pytest.mark.parametrize("penalty", [1.2, 2.0, 0.5, 100.0, 1e-300])
def test_the_repetition_penalty_makes_seen_tokens_less_likely(penalty: float) -> None:
    rng = np.random.default_rng(5)
    for seed in range(10):
        logits = logits_of(seed, 50) - np.float32(15 * (seed % 2))  # every other time all negative
        ids = [int(i) for i in rng.integers(0, 50, 30)]
        expected = logits.astype(np.float64)
        for token in set(ids):
            if expected[token] > 0:
                expected[token] /= penalty
            else:
                expected[token] *= penalty
        before = logits.copy()

        token, _ = Sampler(Parameters(repetition_penalty=penalty)).choose(logits, ids)

        assert token == int(expected.argmax())
        np.testing.assert_array_equal(logits, before)  # the backend's array is left as it is


def test_the_repetition_penalty_knows_what_was_chosen_since() -> None:
    sampler, ids = Sampler(Parameters(repetition_penalty=1.3)), [3, 3, 5]
    for seed in range(30):
        logits = logits_of(seed, 40)
        expected = Sampler(Parameters(repetition_penalty=1.3)).choose(logits, list(ids))
        found = sampler.choose(logits, ids)
        assert found == expected
        ids.append(found[0])
    assert len(set(ids)) > 10


def test_a_penalty_of_one_changes_nothing() -> None:
    logits = logits_of(6)
    best = int(logits.argmax())
    assert Sampler(Parameters(repetition_penalty=1.0)).choose(logits, [best] * 5)[0] == best


def test_a_penalty_works_with_sampling_of_every_kind() -> None:
    logits = np.array([9, 8, -100, -100], dtype=np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}):
        sampler = Sampler(Parameters(do_sample=True, repetition_penalty=90.0, seed=1, **options))
        assert {sampler.choose(logits, [0])[0] for _ in range(50)} == {1}


def test_penalties_count_what_stands_in_the_answer_and_not_in_the_prompt() -> None:
    rng = np.random.default_rng(6)
    parameters = Parameters(frequency_penalty=0.7, presence_penalty=-0.4)
    sampler, answer = Sampler(parameters), np.zeros(8)
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
def test_biases_forbid_and_force_tokens_and_leave_logprobs_as_they_are(
    options: dict[str, Any],
) -> None:
    logits = np.array([3, 2, 1, 0], dtype=np.float32)
    forced = Sampler(Parameters(logit_bias=((2, 100.0),), logprobs=4, **options))
    token, found = forced.choose(logits, [])
    assert token == 2
    assert found is not None
    assert found.top[0][0] == 0
    assert found.chosen == pytest.approx(np.log(softmax(logits))[2], abs=1e-4)
    without = Sampler(Parameters(logit_bias=((0, -100.0), (1, -100.0)), **options))
    assert {without.choose(logits, [])[0] for _ in range(50)} <= {2, 3}


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_logprobs_are_those_of_log_softmax(scale: float) -> None:
    for seed in range(5):
        logits = logits_of(seed, scale=scale)
        expected = np.log(softmax(logits) + 1e-300)
        token, found = Sampler(Parameters(logprobs=5)).choose(logits, [])
        assert found is not None
        assert found.chosen == pytest.approx(expected[token], abs=1e-4)
        assert [i for i, _ in found.top] == [int(i) for i in np.argsort(-logits)[:5]]
        np.testing.assert_allclose(
            [p for _, p in found.top], np.sort(expected)[::-1][:5], atol=1e-4
        )


def test_logprobs_are_of_the_model_and_not_of_the_sampling() -> None:
    logits = logits_of(7)
    expected = np.log(softmax(logits))
    parameters = Parameters(
        do_sample=True, seed=3, temperature=9.0, top_k=50, repetition_penalty=2.0, logprobs=2
    )
    sampler = Sampler(parameters)
    for _ in range(20):
        token, found = sampler.choose(logits, [int(logits.argmax())])
        assert found is not None
        assert found.chosen == pytest.approx(expected[token], abs=1e-4)
        assert found.top[0][0] == int(logits.argmax())


def test_logprobs_of_zero_tokens_give_the_chosen_one_only() -> None:
    _, found = Sampler(Parameters(logprobs=0)).choose(logits_of(8), [])
    assert found is not None
    assert found.top == []


def test_the_largest_values_are_found_as_by_a_full_sort() -> None:
    rng = np.random.default_rng(9)
    for _ in range(200):
        # Few different values, so that the k-th is often one of several equal ones.
        values = rng.integers(0, 12, rng.integers(1, 60)).astype(np.float32)
        k = int(rng.integers(1, 70))
        expected = np.argsort(-values, kind="stable")[:k]
        np.testing.assert_array_equal(top_indices(values, k), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}, {"typical_p": 0.5}],
)
def test_a_vocabulary_smaller_than_what_is_asked_for_is_no_problem(options: dict[str, Any]) -> None:
    logits = logits_of(10, 3)
    assert set(draws(logits, 50, seed=1, **options)) <= {0, 1, 2}
    _, found = Sampler(Parameters(logprobs=20)).choose(logits, [])
    assert found is not None
    assert len(found.top) == 3


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_a_broken_model_still_gives_a_token(options: dict[str, Any]) -> None:
    logits = np.full(600, np.nan, dtype=np.float32)
    assert 0 <= draws(logits, 1, seed=1, **options)[0] < 600
    assert 0 <= Sampler(Parameters()).choose(logits, [])[0] < 600
