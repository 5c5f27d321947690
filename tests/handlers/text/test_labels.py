"""Labels and entities of logits."""

from __future__ import annotations

from typing import Any

import pytest

from handlers.text.labels import Options, entities, ranked, scores

NAMES = ["O", "B-사람", "I-사람"]


def test_scores() -> None:
    assert scores([1.0, 3.0, 2.0], "softmax") == pytest.approx([0.09003057, 0.66524096, 0.24472847])
    assert scores([0.0, 1000.0, -1000.0], "sigmoid") == pytest.approx([0.5, 1.0, 0.0])
    assert scores([1e4, -1e4], "softmax") == [1.0, 0.0]
    assert scores([2.5], "none") == [2.5]


def test_equal_scores_are_in_the_order_of_labels() -> None:
    assert ranked([1.0, 2.0, 2.0], ["a", "b", "c"], "none") == [("b", 2.0), ("c", 2.0), ("a", 1.0)]


def tokens(*given: tuple[int, int, int]) -> dict[str, Any]:
    """Of (label, begin, end), and a special token in front."""
    rows = [[float(label == i) * 9 for i in range(3)] for label, _, _ in given]
    return {
        "logits": [[0.0, 9.0, 0.0], *rows],
        "begins": [0, *(begin for _, begin, _ in given)],
        "ends": [0, *(end for _, _, end in given)],
        "special": [1, *[0] * len(given)],
    }


def found(text: str, result: dict[str, Any], grouped: bool) -> list[tuple[str, str]]:
    made = entities(text, result, NAMES, Options(grouped=grouped))
    for entity in made:
        assert text[entity["start"] : entity["end"]].strip() == entity["word"]
    return [(entity.get("entity") or entity["entity_group"], entity["word"]) for entity in made]


def test_neighbors_of_a_kind_are_one_entity_until_the_next_begins() -> None:
    text = "김철수 이영희가"
    result = tokens((1, 0, 1), (2, 1, 3), (1, 3, 5), (2, 5, 7), (0, 7, 8))
    assert found(text, result, True) == [("사람", "김철수"), ("사람", "이영희")]
    assert found(text, result, False) == [
        ("B-사람", "김"),
        ("I-사람", "철수"),
        ("B-사람", "이"),
        ("I-사람", "영희"),
    ]


def test_a_syllable_of_several_tokens_has_one_label() -> None:
    """As the bytes of one that a vocabulary lacks: the third is no name by itself."""
    result = tokens((1, 0, 1), (2, 1, 2), (2, 1, 2), (0, 1, 2), (0, 2, 3))
    assert found("김뷁은", result, True) == [("사람", "김뷁")]
