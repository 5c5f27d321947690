"""The shortest list that still shows something: delta debugging (Zeller, Hildebrandt 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shortest(items: Sequence[T], shows: Callable[[list[T]], bool]) -> list[T]:
    """Of `items`, which show it, a part of which no single one can be left out.

    `shows` may be costly: it is not asked twice about the same part. What is seen only sometimes
    gives a longer part than need be.
    """
    left, parts = list(range(len(items))), 2
    asked: dict[tuple[int, ...], bool] = {}

    def ask(numbers: list[int]) -> bool:
        key = tuple(numbers)
        if key not in asked:
            asked[key] = shows([items[number] for number in numbers])
        return asked[key]

    if left and ask([]):
        return []
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[i : i + size] for i in range(0, len(left), size)]
        rests = [[n for n in left if n not in piece] for piece in pieces]
        # With two pieces the rests are the pieces.
        smaller = next((p for p in (*pieces, *rests) if p != left and ask(p)), None)
        if smaller is not None:
            parts = 2 if smaller in pieces else max(parts - 1, 2)
            left = smaller
        elif parts >= len(left):
            break
        else:
            parts = min(2 * parts, len(left))
    return [items[number] for number in left]
