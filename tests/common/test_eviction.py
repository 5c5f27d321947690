"""Which models are unloaded for others, and how often one that is asked for is still there."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from benchmarks.switching.trace import KINDS, Kind, results
from common.eviction import MAX_NAMES, Held, Victims


def used(names: Iterable[str]) -> Victims[str]:
    victims = Victims[str]()
    for name in names:
        victims.used(name)
    return victims


def test_of_equals_the_one_that_was_not_asked_for_for_longest_goes() -> None:
    held = {name: Held(100, 1.0) for name in ("가을", "봄", "여름")}
    assert used(["봄", "여름", "가을"]).choose(held, 50) == ["봄"]
    assert used(["봄", "여름", "가을", "봄"]).choose(held, 150) == ["여름", "가을"]


def test_what_is_asked_for_often_stays_though_another_was_asked_for_later() -> None:
    held = {name: Held(100, 1.0) for name in ("봄", "여름", "가을")}
    victims = used(["봄", "봄", "봄", "여름", "가을"])
    assert victims.choose(held, 50) == ["여름"]
    for _ in range(4):  # and not for ever
        victims.used("여름")
        victims.used("가을")
    assert victims.choose(held, 50) == ["봄"]


def test_what_was_unloaded_is_remembered() -> None:
    victims = used(["봄", "봄", "봄", "여름", "여름"])
    victims.used("가을")  # 봄 was unloaded and comes back: it is no newcomer
    victims.used("봄")
    held = {name: Held(100, 1.0) for name in ("봄", "여름", "가을")}
    assert victims.choose(held, 50) == ["가을"]


def test_what_is_large_or_soon_back_goes_first() -> None:
    names = ["봄", "여름", "가을"]
    held = {"봄": Held(100, 1.0), "여름": Held(400, 1.0), "가을": Held(100, 1.0)}
    assert used(names).choose(held, 100) == ["여름"]
    held = {"봄": Held(100, 9.0), "여름": Held(100, 9.0), "가을": Held(100, 0.1)}
    assert used(names).choose(held, 100) == ["가을"]


def test_nothing_goes_in_vain() -> None:
    held = {"작은": Held(10, 0.1), "큰": Held(500, 9.0), "다른": Held(500, 99.0)}
    victims = used(["작은", "큰", "다른"])
    assert victims.choose(held, 300) == ["큰"]
    assert victims.choose(held, 505) == ["작은", "큰"]
    assert victims.choose(held, 2000) == ["작은", "큰", "다른"]
    assert victims.choose({}, 1) == []


def test_names_that_are_asked_for_once_do_not_fill_the_memory() -> None:
    victims = used(f"없는 모델 {i}" for i in range(MAX_NAMES + 100))
    assert len(victims._uses) == MAX_NAMES


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_more_requests_find_their_model_than_with_the_least_recently_used(kind: Kind) -> None:
    found = results(kind, models=50, requests=2000)
    hits, cost_s = found["common.eviction"]
    assert hits >= found["LRU"][0] + 0.015
    assert cost_s <= found["GDSF"][1] * 1.02
    if not kind.unlike:
        assert hits <= found["Belady"][0]
