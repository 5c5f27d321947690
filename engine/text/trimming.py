"""Strips texts such as spaces from both ends of an answer that comes in pieces."""

from __future__ import annotations


class Trimmer:
    """Strips each of `texts` as often as it occurs at an end.

    That is the longest prefix of the answer that is made of them, and then the longest suffix. For
    each position the beginning of the longest run of such texts that ends there is known, so a
    character costs as many comparisons as there are texts, however they overlap.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        # What may become one of them, if more follows; nothing at all may, too.
        self._openings = {text[:n] for text in texts for n in range(len(text))}
        self._longest = max(map(len, texts), default=0)
        self._begun = not texts
        self._held = ""
        self._num_sent = 0  # characters in front of `_held`
        self._runs = [0]  # by position in `_held`; counted from the answer's begin

    def feed(self, text: str) -> str:
        """The part of the answer so far that is final."""
        if not self._texts:
            return text
        self._read(text)
        if not self._begun and self._keep() > 0:
            self._begin()
        keep = self._keep()
        final, self._held = self._held[:keep], self._held[keep:]
        del self._runs[:keep]
        self._num_sent += keep
        return final

    def finish(self, text: str) -> str:
        """The rest, after `text`, which is the last."""
        if not self._texts:
            return text
        final = self.feed(text)
        if not self._begun:
            self._begin()
        return final + self._held[: self._runs[-1] - self._num_sent]

    def _read(self, text: str) -> None:
        self._held += text
        for end in range(len(self._runs), len(self._held) + 1):
            begins = [
                self._runs[end - len(text)]
                for text in self._texts
                if self._held.endswith(text, 0, end)
            ]
            self._runs.append(min(begins, default=self._num_sent + end))

    def _keep(self) -> int:
        """The index in `_held` from where on it may be the suffix."""
        end = len(self._held)
        openings = range(min(self._longest, end + 1))
        begins = [self._runs[end - n] for n in openings if self._held[end - n :] in self._openings]
        return min(begins) - self._num_sent

    def _begin(self) -> None:
        """Strip the prefix; runs of the suffix begin behind it."""
        front = max(at for at, begin in enumerate(self._runs) if begin == 0)
        rest, self._held, self._runs, self._begun = self._held[front:], "", [0], True
        self._read(rest)
