"""Cuts texts such as spaces from both ends of an answer that comes in pieces."""

from __future__ import annotations

import re


class Stripper:
    """Each of `texts` is cut as often as it stands there."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._held = ""
        self._texts = texts
        self._begun = not texts
        whole = "|".join(map(re.escape, texts))
        starts = sorted({t[:n] for t in texts for n in range(1, len(t))}, key=len, reverse=True)
        start = "|".join(map(re.escape, starts)) or "(?!)"
        self._front = re.compile(f"(?:{whole})+")
        # What may turn out to be the end: such texts, and the beginning of one.
        self._end = re.compile(rf"(?:{whole})*(?:{start})?\Z")
        self._last = re.compile(rf"(?:{whole})+\Z")

    def feed(self, text: str) -> str:
        """What of the answer so far is sure to be part of it."""
        if not self._texts:
            return text
        text = self._held + text
        if not self._begun:
            found = self._front.match(text)
            text = text[found.end() :] if found else text
        at = self._end.search(text)
        keep = at.start() if at else len(text)
        self._begun = self._begun or keep > 0
        self._held = text[keep:]
        return text[:keep]

    def finish(self, text: str) -> str:
        """The rest, once `text` is the last."""
        if not self._texts:
            return text
        given = self.feed(text)
        rest = given + self._held
        if not self._begun:
            found = self._front.match(rest)
            rest = rest[found.end() :] if found else rest
        found = self._last.search(rest)
        return rest[: found.start()] if found else rest
