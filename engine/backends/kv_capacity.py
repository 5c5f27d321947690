"""How keys and values of one batch grow where all its rows have buffers of one shape."""

from __future__ import annotations

BLOCK = 64  # positions


def grown(now: tuple[int, int], rows: int, length: int, max_length: int) -> tuple[int, int]:
    """The shape (rows, capacity) that `rows` rows of up to `length` tokens need, from shape `now`.

    Capacity grows in blocks of `BLOCK` positions up to `max_length`, rows to the next power of two;
    neither shrinks.
    """
    blocks = -(-length // BLOCK)
    capacity = min(max(now[1], blocks * BLOCK), max_length)
    return max(now[0], 1 << (rows - 1).bit_length()), capacity
