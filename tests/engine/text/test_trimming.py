"""Both ends of an answer are cut, in whatever pieces it comes, in time that grows with it."""

from __future__ import annotations

import itertools
import random
import sys
from types import FrameType
from typing import Any

import pytest

from engine.text.trimming import Trimmer

WORDS = ["".join(w) for n in (1, 2, 3) for w in itertools.product("ab ", repeat=n)]


def stripped(text: str, strips: tuple[str, ...]) -> str:
    """Strip by trying every beginning, then every end of the rest."""

    def is_made_of_them(piece: str) -> bool:
        ways = {0}
        for at in range(len(piece)):
            if at in ways:
                ways |= {at + len(s) for s in strips if piece.startswith(s, at)}
        return len(piece) in ways

    front = max(n for n in range(len(text) + 1) if is_made_of_them(text[:n]))
    rest = text[front:]
    end = min(n for n in range(len(rest) + 1) if is_made_of_them(rest[n:]))
    return rest[:end]


def in_pieces(text: str, cuts: list[int], strips: tuple[str, ...]) -> str:
    trimmer = Trimmer(strips)
    *pieces, last = (text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]))
    return "".join(trimmer.feed(piece) for piece in pieces) + trimmer.finish(last)


def test_each_pair_of_texts_is_cut_as_by_trying_everything() -> None:
    rng = random.Random(7)  # noqa: S311
    for strips in itertools.product(WORDS, repeat=2):
        for _ in range(4):
            parts = rng.choices([*strips * 3, "a", "b", " ", "가", "가 나"], k=rng.randrange(8))
            text = "".join(parts)
            cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))
            assert in_pieces(text, cuts, strips) == stripped(text, strips), (text, cuts, strips)


def steps(strips: tuple[str, ...], text: str) -> int:
    """Count the interpreter's instructions for a text that comes a character at a time."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        in_pieces(text, list(range(1, len(text))), strips)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("strips", [("\n", "\n\n"), ("a", "aa", "aaa"), ("a" * 63, "a" * 64)])
@pytest.mark.parametrize("last", ["", "b"])
def test_twice_the_text_takes_twice_the_steps(strips: tuple[str, ...], last: str) -> None:
    """Where each text can be read in many ways, and where none of them holds in the end."""
    letter = strips[0][0]
    short, long = (steps(strips, letter * n + last) for n in (200, 400))
    assert long < 2.2 * short
