"""Speculation: guesses of a sequence's next tokens, which one pass checks together.

A guess is what followed the same tokens before: in the sequence's own text, or in an answer that
the model gave lately. It is accepted only where the token that is drawn is the guess, so texts are
the same with and without. All of it runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

LENGTHS = (3, 2)  # of the runs of tokens that are looked up, the longer first
RECENT_TOKENS = 16_384  # of a model's last answers, in some 4 MB; older ones are dropped
FEWEST = 3  # guesses of a pass: with one row four tokens take 1.1 times as long as one
PAUSE = 24  # passes without guesses where they did not pay; it doubles each time
MOST = 7  # guesses of a pass, after passes in which all were right
WORTH = 0.15  # the least rate of accepted guesses for which a pass is not slower, with a margin
SMOOTHING = 0.25  # weight of the last pass in the rate of accepted guesses


class Text:
    """Tokens, and where each run of two or three of them occurred last."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # the place behind a run

    def extend(self, ids: Seq[int]) -> None:
        begin = len(self.ids)
        self.ids.extend(ids)
        for length in LENGTHS:
            first = max(begin, length)
            tokens = self.ids[first - length :]
            runs = zip(*(tokens[i:] for i in range(length)), strict=False)
            self._behind.update(zip(runs, range(first, len(self.ids)), strict=False))

    def after(self, run: tuple[int, ...], count: int) -> list[int]:
        """At most `count` tokens that followed a run; none where it has not occurred."""
        at = self._behind.get(run)
        return [] if at is None else self.ids[at : at + count]


class Recent(Text):
    """A model's answers of late, and the rate at which its guesses were accepted."""

    rate = 0.4

    def extend(self, ids: Seq[int]) -> None:
        if len(self.ids) + len(ids) > RECENT_TOKENS:
            recent = self.ids[-RECENT_TOKENS // 2 :]
            self.ids, self._behind = [], {}
            super().extend(recent)
        super().extend(ids)


class Guesser:
    """Guesses for one sequence, for as long as enough of them are accepted."""

    def __init__(self, recent: Recent) -> None:
        self._own, self._recent = Text(), recent
        self._rate, self._count = max(recent.rate, WORTH), FEWEST
        self._left, self._pause = 0, PAUSE  # passes: of the pause under way, of the next

    def guess(self, ids: Seq[int], most: int) -> list[int]:
        """Tokens that may follow `ids`, at most `most`."""
        if self._left:
            self._left -= 1
            return []
        if self._rate < WORTH:
            self._left, self._pause, self._rate = self._pause, 2 * self._pause, WORTH
            return []
        self._own.extend(ids[len(self._own.ids) :])
        count = min(self._count, MOST, most)
        for length in LENGTHS:
            for text in (self._own, self._recent):
                guesses = text.after(tuple(ids[-length:]), count)
                if guesses:
                    return guesses
        return []

    def check(self, guessed: int, accepted: int) -> None:
        """Takes in how many of a pass's guesses were accepted."""
        self._rate += SMOOTHING * (accepted / guessed - self._rate)
        self._recent.rate += SMOOTHING / 4 * (accepted / guessed - self._recent.rate)
        self._count = 2 * self._count + 1 if accepted == guessed else FEWEST
        self._pause = PAUSE if accepted else self._pause
