"""Finds phrases in an answer, and the tokens that complete one, however it is tokenized."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from engine.text.table import Table

Tokens = NDArray[np.uint32]


class Phrases:
    """Texts to find in the joined bytes of tokens. Immutable.

    The pieces are joined even if the tokenizer decodes otherwise (a table of kind `PROCESS`).

    longest: length of the longest text, in bytes
    within: tokens that contain one of the texts
    """

    def __init__(self, table: Table, texts: tuple[str, ...]) -> None:
        self._table = table
        self._texts = tuple({text.encode("utf-8", "surrogatepass") for text in texts})
        self.longest = max(map(len, self._texts), default=1)
        containing = {token for text in self._texts for token in table.holding(text)}
        self.within: Tokens = np.array(sorted(containing), np.uint32)
        # For each beginning of a text, the tokens that begin with the rest of that text.
        self._after: dict[bytes, list[Tokens]] = defaultdict(list)
        for text in self._texts:
            for at in range(max(len(text) - table.longest, 1), len(text)):
                tokens = table.beginning(text[at:])
                if len(tokens):
                    self._after[text[:at]].append(tokens)
        self._sizes = sorted(set(map(len, self._after)))

    def read(self, tail: bytes, token: int) -> tuple[bytes, bool]:
        """Append a token to `tail`; return the bytes that still matter, and if a text ended."""
        begin = len(tail)
        tail += self._table.join([token])
        ends = any(tail.find(text, max(begin - len(text) + 1, 0)) >= 0 for text in self._texts)
        return tail[max(len(tail) - self.longest + 1, 0) :], ends

    def completing(self, tail: bytes) -> list[Tokens]:
        """Return the tokens that complete one of the texts if they follow `tail`."""
        tokens = [self.within]
        for size in self._sizes:
            if size > len(tail):
                break
            tokens += self._after.get(tail[-size:], ())
        return tokens
