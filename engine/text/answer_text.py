"""Turns an answer's tokens into final text, and ends the answer at a stop string."""

from __future__ import annotations

from engine.text.table import Detokenizer
from engine.text.trimming import Trimmer


class AnswerText:
    """Turns an answer's ids, one by one, into pieces of its text."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        strip: tuple[str, ...],
        min_tokens: int = 0,
        leading_space: bool = False,
    ) -> None:
        """Begin an answer.

        min_tokens: stop strings that end in the first so many tokens do not count, as in vLLM
        leading_space: whether to drop a space at the beginning
        """
        self._detokenizer, self._stops = detokenizer, stops
        self._unsearched = min_tokens  # tokens
        self._trimmer = Trimmer(strip)
        self._leading_space = leading_space
        self._held = ""  # text that may be the beginning of a stop string

    def write(self, token: int, end: str | None = None) -> tuple[str, bool]:
        """Return the text that is final now, and whether a stop string has ended the answer.

        `end` is why the answer ends with this token: "stop" for an end token, which has no text,
        "length" or "complete" for another last token, else None.
        """
        if end == "stop":
            return self._trimmer.finish(self._held + self._detokenizer.flush()), False
        new = self._detokenizer.feed(token)
        if self._leading_space and new:
            new, self._leading_space = new.removeprefix(" "), False
        text, begin = self._held + new, len(self._held)
        if self._unsearched:
            self._unsearched, begin = self._unsearched - 1, len(text)
        at, keep = _find_stop(text, self._stops, begin)
        if at is None and end is not None:
            text += self._detokenizer.flush()
            at, _ = _find_stop(text, self._stops, begin)
        if at is not None or end is not None:
            return self._trimmer.finish(text[:at]), at is not None
        self._held = text[len(text) - keep :]
        return self._trimmer.feed(text[: len(text) - keep]), False


def _find_stop(text: str, stops: tuple[str, ...], begin: int) -> tuple[int | None, int]:
    """Return where the first stop string that ends after `begin` starts, or None.

    The second value is how many characters at the end of `text` may be the start of a stop string.
    """
    places = [text.find(stop, max(begin - len(stop) + 1, 0)) for stop in stops]
    places = [at for at in places if at >= 0]
    if places:
        return min(places), 0
    keep = 0
    for stop in stops:
        at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        keep = max(keep, len(text) - at if at >= 0 else 0)
    return None, keep
