"""Rules forbid tokens, or make them less likely, as plain definitions over all ids do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.parameters import Parameters
from engine.engine import Engine
from engine.rules import FORBIDDEN, rules_of
from engine.sampling import Sampler
from engine.text.phrases import Phrases
from engine.text.table import BYTES, RUNS, SEPARATE, Table
from tests.engine.conftest import NewEngine
from tests.engine.engines import Request, make_talkative

VOCAB = 12
# Tokens 0 and 1 are no text.
PIECES = ("</s>", "<pad>", "\n", "가", "나", "가나", "나다", " 가", "다\n라", "a", "ab", "b")
TABLE = Table(SEPARATE, [piece.encode() for piece in PIECES], {0, 1})
Histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


def adjusted(ids: list[int], prompt: int, table: Table = TABLE, **options: Any) -> NDArray[Any]:
    """Logits of zeros after the ids, of which `prompt` are a prompt's, read one step a token."""
    phrases = partial(Phrases, table)
    rules = rules_of(Parameters(**options), ids[:prompt], {0}, phrases)
    logits = np.zeros(len(table), np.float32)
    for end in range(prompt, len(ids) + 1):
        logits[:] = 0
        for rule in rules:
            rule(logits, np.array(ids[:end]))
    return logits


def forbidden(ids: list[int], prompt: int, **options: Any) -> set[int]:
    logits = adjusted(ids, prompt, **options)
    assert set(np.unique(logits)) <= {0, FORBIDDEN}
    return set(np.flatnonzero(logits).tolist())


def cuts(ids: list[int]) -> Iterator[int]:
    """Lengths of the prompt, on which no rule depends."""
    return iter(sorted({1, len(ids) // 2 or 1, len(ids)}))


@given(
    Histories, st.lists(st.text("가나다라ab\n ", min_size=1, max_size=4), min_size=1, max_size=4)
)
def test_a_token_is_forbidden_where_a_text_would_end(ids: list[int], words: list[str]) -> None:
    begin = len(TABLE.join(ids)) + 1
    expected = {
        token
        for token in range(VOCAB)
        for word in map(str.encode, words)
        if TABLE.join([*ids, token]).find(word, max(begin - len(word), 0)) >= 0
    }
    for prompt in cuts(ids):
        assert forbidden(ids, prompt, bad_words=tuple(words)) == expected


def test_a_text_is_forbidden_however_it_is_cut_into_tokens() -> None:
    """All answers that may be, of all ways to write them."""
    vocabulary = ["나쁜말", "나쁜", "말", "나", "쁜말", "쁜", "의말", " 나쁜", "말씀"]
    raw = [bytes([byte]) for byte in "말".encode()]
    pieces = [*(text.encode() for text in vocabulary), *raw]
    byte_ids = range(len(vocabulary), len(pieces))
    for kind, ids in ((BYTES, ()), (RUNS, byte_ids), (SEPARATE, byte_ids)):
        table = Table(kind, pieces, (), ids)
        banned = 0
        for answer in itertools.product(range(len(pieces)), repeat=3):
            rules = rules_of(Parameters(bad_words=("나쁜말",)), [7], set(), partial(Phrases, table))
            allowed = True
            for at in range(3):
                logits = np.zeros(len(pieces), np.float32)
                rules[0](logits, np.array([7, *answer[:at]]))
                allowed = allowed and not logits[answer[at]]
            assert allowed == ("나쁜말" not in table.text([7, *answer]))
            banned += not allowed
        assert banned > 100


def test_a_text_of_bytes_that_begins_like_itself_is_found() -> None:
    pieces = [b"a", b"b", b"aab", b"x"]
    table = Table(BYTES, pieces)
    logits = adjusted([3, 0, 0, 0], 1, table, bad_words=("aab", "xaab"))
    assert set(np.flatnonzero(logits).tolist()) == {1, 2}


def test_what_is_no_text_holds_no_word() -> None:
    assert forbidden([2], 1, bad_words=("s>", "pad")) == set()
    # And what stands on either side of it is one text.
    assert forbidden([3, 1], 1, bad_words=("가나",)) == {4, 5, 6}


def test_no_end_token_comes_before_there_are_enough_tokens() -> None:
    for new in range(5):
        expected = {0} if new < 3 else set()
        assert forbidden([5, 5, *[4] * new], 2, min_new_tokens=3) == expected
    # One outside of the vocabulary does no harm.
    [rule] = rules_of(Parameters(min_new_tokens=1), [1], {-1, 2, 10**9}, partial(Phrases, TABLE))
    logits = np.zeros(VOCAB, np.float32)
    rule(logits, np.array([1]))
    assert np.flatnonzero(logits).tolist() == [2]
    assert forbidden([5], 1, min_new_tokens=3, ignore_eos=True) == set()


def dry(ids: list[int], breakers: set[int], p: Parameters) -> NDArray[np.float64]:
    """Return DRY's penalty of each token's logit, by its definition: `breakers` are tokens."""
    window = ids if p.dry_penalty_last_n < 0 else ids[-p.dry_penalty_last_n :]
    unbroken = next((n for n, t in enumerate(reversed(ids)) if t in breakers), len(ids))
    found = np.zeros(VOCAB)
    for end in range(1, len(window)):
        token, length = window[end], 0
        while length < min(end, unbroken) and window[end - 1 - length] == window[-1 - length]:
            length += 1
        if length >= p.dry_allowed_length and token not in breakers:
            penalty = p.dry_multiplier * p.dry_base ** (length - p.dry_allowed_length)
            found[token] = max(found[token], penalty)
    return found


@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=40),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([-1, 1, 5, 12, 100]),
    st.sampled_from([1.0, 1.75, 3.0]),
)
def test_a_repetition_is_less_likely(ids: list[int], allowed: int, last: int, base: float) -> None:
    options: dict[str, Any] = {"dry_multiplier": 0.8, "dry_base": base}
    options |= {"dry_allowed_length": allowed, "dry_penalty_last_n": last}
    for texts, breakers in ((("\n", ":"), {2, 8}), ((), set()), (("나",), {4, 5, 6})):
        p = Parameters(**options, dry_sequence_breakers=texts)
        expected = -dry(ids, breakers, p)
        for prompt in cuts(ids):
            found = adjusted(ids, prompt, **options, dry_sequence_breakers=texts)
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_breaker_of_several_tokens_ends_a_repetition() -> None:
    """ab 가 나 ab 가: of what is repeated, only 가 stands behind the breaker "b가"."""
    ids = [10, 3, 4, 10, 3]
    options = {"dry_multiplier": 1.0, "dry_allowed_length": 1}
    assert adjusted(ids, 1, **options, dry_sequence_breakers=("\n",))[4] == pytest.approx(-1.75)
    assert adjusted(ids, 1, **options, dry_sequence_breakers=("b가",))[4] == 0
    assert adjusted(ids, 1, **options, dry_sequence_breakers=("ab",))[4] == -1


def test_a_penalty_without_bounds_is_a_ban() -> None:
    found = adjusted([3] * 1000, 1, dry_multiplier=100.0, dry_base=100.0)
    assert found[3] == FORBIDDEN
    assert np.count_nonzero(found) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"temperature": 1e-6}, {"temperature": 100.0}, {"top_k": 50},
     {"top_p": 0.9999}, {"min_p": 0.01}, {"typical_p": 0.9}, {"top_k": 5000, "typical_p": 0.9}],
)  # fmt: skip
def test_forbidden_tokens_are_never_drawn_and_change_no_logprobs(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(6000).astype(np.float32)
    most = tuple((int(i),) for i in np.argsort(-logits)[:300])
    p = Parameters(
        bad_words_ids=most, seed=1, logprobs=1, **{"do_sample": bool(options), **options}
    )
    rules = rules_of(p, [1], {0}, partial(Phrases, TABLE))
    sampler, ids = Sampler(p, 0, rules), [1]
    for _ in range(100):
        token, found = sampler.choose(logits, ids)
        assert (token,) not in most
        assert found is not None
        assert found.top[0][0] == most[0][0]
        ids.append(token)


def test_a_token_is_chosen_where_all_are_forbidden() -> None:
    every = tuple((i,) for i in range(VOCAB))
    for options in ({}, {"do_sample": True, "seed": 1}, {"do_sample": True, "top_p": 0.5}):
        p = Parameters(bad_words_ids=every, min_new_tokens=9, **options)
        rules = rules_of(p, [1], {0}, partial(Phrases, TABLE))
        token, _ = Sampler(p, 0, rules).choose(np.ones(VOCAB, np.float32), [1])
        assert 0 <= token < VOCAB


# In the engine


@pytest.fixture
def engine(new_engine: NewEngine, tmp_path: Path) -> Engine:
    models = {"m": make_talkative(tmp_path / "m", vocab=160)}
    return new_engine(models, backend="native", precision="fp32")


def ask(engine: Engine, new: int, name: str = "m", **given: Any) -> Request:
    return Request(engine, name, "오늘은", max_new_tokens=new, **given).wait()


@pytest.mark.parametrize("sampled", [{}, {"seed": 3}, {"seed": 3, "temperature": 2, "top_k": 20}])
def test_answers_do_not_hold_what_is_forbidden(engine: Engine, sampled: dict[str, Any]) -> None:
    text = free = ask(engine, 40, **sampled).text()
    words: list[str] = []
    for _ in range(20):  # as long as the answer finds others
        words += [text[at : at + 3] for at in range(0, len(text) - 3, 5)]
        words = sorted(set(words))[:256]
        found = ask(engine, 40, bad_words=words, **sampled)
        text = found.text()
        assert found.error is None
        assert not [word for word in words if word in text]
    assert text != free


def test_an_answer_has_as_many_tokens_as_are_wanted(engine: Engine, tmp_path: Path) -> None:
    ends = make_talkative(tmp_path / "ends", vocab=160, end_like=ask(engine, 9).ids()[-1])
    engine.load("ends", str(ends))
    first = ask(engine, 60, "ends")
    assert first.finish_reason() == "stop"
    count = len(first.ids()) + 5
    assert len(ask(engine, 60, "ends", min_tokens=count).ids()) >= count
    text = ask(engine, 3).text()
    assert not ask(engine, 3, stop=[text[:1]]).text()
    longer = ask(engine, 3, stop=[text[:1]], min_tokens=3)
    assert (longer.text(), longer.finish_reason()) == (text, "length")
