"""Speculative decoding: guesses of a sequence's next tokens, which one pass checks together.

The last two or three tokens are searched for in the sequence's own text and in the model's recent
answers; the tokens behind them are the guesses. A guess is accepted only if the sampler draws the
same token, so texts do not depend on guesses. All of this runs on the step loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

LENGTHS = (3, 2)  # tokens of the runs that are searched for, longest first
RECENT_TOKENS = 16_384  # most tokens of a model's recent answers, which take about 4 MB
FEWEST = 3  # least guesses a pass: with one row, four tokens take 1.1 times as long as one
PAUSE = 24  # passes without guesses after too few were accepted; doubles each time
MOST = 7  # most guesses a pass, after passes in which all were accepted
WORTH = 0.15  # the least rate of accepted guesses for which a pass is not slower, with a margin
SMOOTHING = 0.25  # weight of the last pass in the rate of accepted guesses


class Text:
    """Tokens with an index of the last occurrence of each run of two or three tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # index of the token behind a run

    def extend(self, ids: Seq[int]) -> None:
        begin = len(self.ids)
        self.ids.extend(ids)
        for length in LENGTHS:
            first = max(begin, length)
            tokens = self.ids[first - length :]
            runs = zip(*(tokens[i:] for i in range(length)), strict=False)
            self._behind.update(zip(runs, range(first, len(self.ids)), strict=False))

    def after(self, run: tuple[int, ...], count: int) -> list[int]:
        """Return up to `count` tokens that followed the last occurrence of a run, if any."""
        at = self._behind.get(run)
        return [] if at is None else self.ids[at : at + count]


class Recent(Text):
    """Tokens of a model's recent answers, and the rate at which its guesses are accepted."""

    rate = 0.4

    def extend(self, ids: Seq[int]) -> None:
        if len(self.ids) + len(ids) > RECENT_TOKENS:
            recent = self.ids[-RECENT_TOKENS // 2 :]
            self.ids, self._behind = [], {}
            super().extend(recent)
        super().extend(ids)


class Guesser:
    """Guesses the next tokens of one sequence, with pauses when too few are accepted."""

    def __init__(self, recent: Recent) -> None:
        self._own, self._recent = Text(), recent
        self._rate, self._count = max(recent.rate, WORTH), FEWEST
        self._left, self._pause = 0, PAUSE  # remaining passes of this pause; passes of the next

    def guess(self, ids: Seq[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow `ids`."""
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
        """Update the rates after a pass with `guessed` guesses, of which `accepted` were right."""
        self._rate += SMOOTHING * (accepted / guessed - self._rate)
        self._recent.rate += SMOOTHING / 4 * (accepted / guessed - self._recent.rate)
        self._count = 2 * self._count + 1 if accepted == guessed else FEWEST
        self._pause = PAUSE if accepted else self._pause

    def remember(self, ids: Seq[int]) -> None:
        """Store a finished answer, for guesses of others."""
        self._recent.extend(ids)
