"""Which models are evicted for others, and the hit rate that results."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from common.eviction import MAX_NAMES, Held, Victims
from testbed.trace import KINDS, Kind, results


def used(names: Iterable[str]) -> Victims[str]:
    victims = Victims[str]()
    for name in names:
        victims.used(name)
    return victims


def test_of_equal_models_the_least_recently_used_is_evicted() -> None:
    held = {name: Held(100, 1.0) for name in ("가을", "봄", "여름")}
    assert used(["봄", "여름", "가을"]).choose(held, 50) == ["봄"]
    assert used(["봄", "여름", "가을", "봄"]).choose(held, 150) == ["여름", "가을"]


def test_a_frequently_used_model_outlives_more_recent_ones() -> None:
    held = {name: Held(100, 1.0) for name in ("봄", "여름", "가을")}
    victims = used(["봄", "봄", "봄", "여름", "가을"])
    assert victims.choose(held, 50) == ["여름"]
    for _ in range(4):  # and not for ever
        victims.used("여름")
        victims.used("가을")
    assert victims.choose(held, 50) == ["봄"]


def test_uses_of_an_evicted_model_count_when_it_comes_back() -> None:
    victims = used(["봄", "봄", "봄", "여름", "여름"])
    victims.used("가을")  # 봄 was unloaded and comes back: it is no newcomer
    victims.used("봄")
    held = {name: Held(100, 1.0) for name in ("봄", "여름", "가을")}
    assert victims.choose(held, 50) == ["가을"]


def test_a_large_model_or_one_that_loads_fast_is_evicted_first() -> None:
    names = ["봄", "여름", "가을"]
    held = {"봄": Held(100, 1.0), "여름": Held(400, 1.0), "가을": Held(100, 1.0)}
    assert used(names).choose(held, 100) == ["여름"]
    held = {"봄": Held(100, 9.0), "여름": Held(100, 9.0), "가을": Held(100, 0.1)}
    assert used(names).choose(held, 100) == ["가을"]


def test_no_model_is_evicted_that_need_not_be() -> None:
    held = {"작은": Held(10, 0.1), "큰": Held(500, 9.0), "다른": Held(500, 99.0)}
    victims = used(["작은", "큰", "다른"])
    assert victims.choose(held, 300) == ["큰"]
    assert victims.choose(held, 505) == ["작은", "큰"]
    assert victims.choose(held, 2000) == ["작은", "큰", "다른"]
    assert victims.choose({}, 1) == []


def test_the_number_of_remembered_names_is_bounded() -> None:
    victims = used(f"없는 모델 {i}" for i in range(MAX_NAMES + 100))
    assert len(victims._uses) == MAX_NAMES


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_more_requests_find_their_model_than_with_lru(kind: Kind) -> None:
    found = results(kind, models=50, requests=2000)
    hits, cost_s = found["common.eviction"]
    assert hits >= found["LRU"][0] + 0.015
    assert cost_s <= found["GDSF"][1] * 1.02
    if not kind.unlike:
        assert hits <= found["Belady"][0]
