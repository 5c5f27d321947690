"""Strips texts such as spaces from both ends of an answer that comes in pieces."""

from __future__ import annotations


class Trimmer:
    """Strips `texts` from both ends of an answer, each as often as it occurs there.

    The longest prefix that is a sequence of the texts is stripped, then the longest such suffix.
    `_runs` has, for each position, the beginning of the longest sequence that ends there, so a
    character costs as many comparisons as there are texts, however they overlap.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        # Beginnings of the texts, which more characters may complete; the empty one is among them.
        self._openings = {text[:n] for text in texts for n in range(len(text))}
        self._longest = max(map(len, texts), default=0)
        self._begun = not texts
        self._held = ""
        self._num_sent = 0  # characters in front of `_held`
        self._runs = [0]  # by position in `_held`; places from the answer's begin on

    def feed(self, text: str) -> str:
        """Append `text` to the answer; return the next part that is final."""
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
        """Append the last `text` to the answer; return the rest of the answer."""
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
        """Return the index in `_held` from which on the text may be part of the suffix."""
        end = len(self._held)
        openings = range(min(self._longest, end + 1))
        begins = [self._runs[end - n] for n in openings if self._held[end - n :] in self._openings]
        return min(begins) - self._num_sent

    def _begin(self) -> None:
        """Strip the prefix, and restart `_runs` after it for the suffix."""
        front = max(at for at, begin in enumerate(self._runs) if begin == 0)
        rest, self._held, self._runs, self._begun = self._held[front:], "", [0], True
        self._read(rest)
