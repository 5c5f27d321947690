"""Cuts texts such as spaces from both ends of an answer that comes in pieces."""

from __future__ import annotations


class Trimmer:
    """Each of `texts` is cut as often as it stands there: of the answer the longest beginning that
    is made of them, and of what is left the longest end.

    Of every position it is known where the longest run of such texts that ends there begins, so a
    character costs as many comparisons as there are texts, however they overlap.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        # What may become one of them, if more follows; nothing at all may, too.
        self._openings = {text[:n] for text in texts for n in range(len(text))}
        self._longest = max(map(len, texts), default=0)
        self._begun = not texts
        self._held = ""
        self._given = 0  # characters in front of `_held`
        self._runs = [0]  # by position in `_held`; counted from the answer's begin

    def feed(self, text: str) -> str:
        """What of the answer so far is sure to be part of it."""
        if not self._texts:
            return text
        self._read(text)
        if not self._begun and self._keep() > 0:
            self._begin()
        keep = self._keep()
        given, self._held = self._held[:keep], self._held[keep:]
        del self._runs[:keep]
        self._given += keep
        return given

    def finish(self, text: str) -> str:
        """The rest, once `text` is the last."""
        if not self._texts:
            return text
        given = self.feed(text)
        if not self._begun:
            self._begin()
        return given + self._held[: self._runs[-1] - self._given]

    def _read(self, text: str) -> None:
        self._held += text
        for end in range(len(self._runs), len(self._held) + 1):
            begins = [
                self._runs[end - len(text)]
                for text in self._texts
                if self._held.endswith(text, 0, end)
            ]
            self._runs.append(min(begins, default=self._given + end))

    def _keep(self) -> int:
        """Where in `_held` begins what may turn out to be the end."""
        end = len(self._held)
        openings = range(min(self._longest, end + 1))
        begins = [self._runs[end - n] for n in openings if self._held[end - n :] in self._openings]
        return min(begins) - self._given

    def _begin(self) -> None:
        """Cuts the front; the end's runs begin behind it."""
        front = max(at for at, begin in enumerate(self._runs) if begin == 0)
        rest, self._held, self._runs, self._begun = self._held[front:], "", [0], True
        self._read(rest)
