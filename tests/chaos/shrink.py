"""The shortest list that still fails: delta debugging (Zeller, Hildebrandt 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shortest(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """The part of `items` that fails and of which no single item can be left out.

    `fails` is called once for each part. A failure that is seen only sometimes gives a longer part.
    """
    left, parts = list(range(len(items))), 2
    outcomes: dict[tuple[int, ...], bool] = {}

    def still_fails(numbers: list[int]) -> bool:
        key = tuple(numbers)
        if key not in outcomes:
            outcomes[key] = fails([items[number] for number in numbers])
        return outcomes[key]

    if left and still_fails([]):
        return []
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[i : i + size] for i in range(0, len(left), size)]
        rests = [[n for n in left if n not in piece] for piece in pieces]
        # With two pieces the rests are the pieces.
        smaller = next((p for p in (*pieces, *rests) if p != left and still_fails(p)), None)
        if smaller is not None:
            parts = 2 if smaller in pieces else max(parts - 1, 2)
            left = smaller
        elif parts >= len(left):
            break
        else:
            parts = min(2 * parts, len(left))
    return [items[number] for number in left]
