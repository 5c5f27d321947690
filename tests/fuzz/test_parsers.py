"""Every parser of foreign bytes takes or refuses any input, within memory in proportion to it.
`python -m tests.fuzz` does the same for longer."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import tried
from tests.fuzz.cases import CORPUS, ELSEWHERE, MADE, case, seeds
from tests.fuzz.targets import TARGETS

CASES = settings(max_examples=60, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_of_the_corpus_are_taken_or_refused(name: str) -> None:
    taken = [tried(name, data) for data in seeds(name)]
    assert any(taken)


def test_every_parser_has_a_corpus_and_every_corpus_a_parser() -> None:
    others = {*ELSEWHERE, *MADE}
    assert {path.name for path in CORPUS.iterdir()} | others == set(TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs_are_taken_or_refused(name: str) -> None:
    known = seeds(name)

    @CASES
    @given(st.integers(0, 2**32))
    def attempt(seed: int) -> None:
        tried(name, case(random.Random(seed), known))  # noqa: S311

    attempt()
