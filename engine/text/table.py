"""The bytes of a tokenizer's ids, with which the engine makes text of ids itself.

The process that reads the tokenizer makes the table and checks it; what arrives is foreign.
"""

from __future__ import annotations

import base64
import codecs
import functools
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

REPLACEMENT = "\ufffd"
# How pieces become a text.
SEPARATE = "separate"  # as in the guides' loop for v1: a piece ends a character left open before it
BYTES = "bytes"  # all pieces are joined, and the whole is decoded
RUNS = "runs"  # pieces are texts; a run of single bytes is decoded as a whole
PROCESS = ""  # not by joining pieces: the text process decodes
KINDS = (SEPARATE, BYTES, RUNS, PROCESS)
ALL_SPACES = 1 << 16

# Of ids their text, where the last of them begin that make some text, and that.
Decode = Callable[[list[int]], tuple[str, int, str]]


class Detokenizer(Protocol):
    """Turns a sequence's ids into text one by one, for a stream."""

    def feed(self, token: int) -> str:
        """The text that `token` completes, often all of its own, sometimes none."""

    def flush(self) -> str:
        """What is left of a character cut short, as U+FFFD."""


class Table:
    """Each id's piece: its bytes as they stand in a text; a control token's name.

    silent: ids that are no text, such as `<s>`
    byte_ids: ids that are one byte of a character
    lead: how many leading spaces the first piece of a text loses at most
    """

    def __init__(
        self,
        kind: str,
        pieces: Sequence[bytes],
        silent: Iterable[int] = (),
        byte_ids: Iterable[int] = (),
        lead: int = 0,
    ) -> None:
        self.kind, self.lead = kind, lead
        self.silent, self.byte_ids = frozenset(silent), frozenset(byte_ids)
        self._blob = b"".join(pieces)
        self._ends = array("I", accumulate(map(len, pieces), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def piece(self, token: int) -> bytes:
        ends = self._ends
        return self._blob[ends[token] : ends[token + 1]] if token < len(ends) - 1 else b""

    def is_silent(self, token: int) -> bool:
        return token in self.silent or token >= len(self)

    def join(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids that are text."""
        return b"".join(self.piece(i) for i in ids if i not in self.silent)

    @functools.cached_property
    def _sorted(self) -> tuple[list[bytes], NDArray[np.uint32]]:
        """The pieces that are text, in their order, and their ids: 3 MB of 50,000, in 50 ms."""
        texts = [(piece, i) for i, piece in enumerate(self.pieces()) if i not in self.silent]
        texts.sort()
        return [piece for piece, _ in texts], np.array([i for _, i in texts], np.uint32)

    @functools.cached_property
    def longest(self) -> int:
        """Bytes of the longest piece."""
        return max(map(len, self._sorted[0]), default=0)

    @functools.cached_property
    def _heads(self) -> NDArray[np.uint32]:
        """By place in `_blob`, three bytes as a number."""
        blob = np.frombuffer(self._blob + bytes(2), np.uint8).astype(np.uint32)
        return np.asarray(blob[:-2] << 16 | blob[1:-1] << 8 | blob[2:], np.uint32)

    def beginning(self, text: bytes) -> NDArray[np.uint32]:
        """The ids whose pieces begin with `text`, which does not end in 0xFF."""
        pieces, ids = self._sorted
        first = bisect_left(pieces, text)
        return ids[first : bisect_left(pieces, text[:-1] + bytes([text[-1] + 1]), first)]

    def holding(self, text: bytes) -> list[int]:
        """The ids whose pieces hold `text`."""
        head, ends = text[:3], np.frombuffer(self._ends, np.uint32)
        places = self._heads >> 8 * (3 - len(head)) == int.from_bytes(head, "big")
        at = np.flatnonzero(places)  # `bytes.find` takes five times as long
        tokens = np.searchsorted(ends, at, side="right") - 1
        whole = at + len(text) <= ends[tokens + 1]
        found = zip(tokens[whole].tolist(), at[whole].tolist(), strict=True)
        blob, silent = self._blob, self.silent
        return [i for i, a in found if i not in silent and blob.startswith(text, a)]

    def detokenizer(self, prompt: Sequence[int], decode: Decode) -> Detokenizer:
        """For the ids that follow `prompt`. `decode` is called where joining is not enough."""
        if self.kind == SEPARATE:
            return SeparateDetokenizer(self)
        if self.kind == PROCESS:
            return WindowDetokenizer(self, prompt, decode)
        return JoinedDetokenizer(self, prompt)

    def text(self, ids: Sequence[int]) -> str:
        """Of ids that nothing stands before."""
        detokenizer = self.detokenizer([], lambda _: ("", 0, ""))
        return "".join(map(detokenizer.feed, ids)) + detokenizer.flush()

    def pieces(self) -> Iterator[bytes]:
        """Those of all ids, in their order."""
        return (self._blob[a:b] for a, b in pairwise(self._ends))

    def to_json(self) -> dict[str, Any]:
        lengths = [b - a for a, b in pairwise(self._ends)]
        pieces = base64.b64encode(self._blob).decode()
        ids = {"silent": sorted(self.silent), "byte_ids": sorted(self.byte_ids)}
        return {"kind": self.kind, "pieces": pieces, "lengths": lengths, **ids, "lead": self.lead}

    @classmethod
    def from_json(cls, said: Any) -> Table:
        """What `to_json` gave. Raises `KeyError`, `TypeError`, `ValueError`, `OverflowError`."""
        blob = base64.b64decode(said["pieces"], validate=True)
        pieces = [blob[a:b] for a, b in pairwise(accumulate(said["lengths"], initial=0))]
        if said["kind"] not in KINDS or sum(said["lengths"]) != len(blob) or said["lead"] < 0:
            raise ValueError("no table")
        silent, byte_ids = map(int, said["silent"]), map(int, said["byte_ids"])
        return cls(said["kind"], pieces, silent, byte_ids, said["lead"])


class SeparateDetokenizer:
    """Control pieces are silent; byte pieces are held back until they make whole characters."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False

    def feed(self, token: int) -> str:
        table = self._table
        if token in table.byte_ids:
            self._open = True
            return self._utf8.decode(table.piece(token))
        text = self.flush() if self._open else ""
        return (
            text if table.is_silent(token) else text + table.piece(token).decode("utf-8", "replace")
        )

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._open = False
        return text


class JoinedDetokenizer:
    """Gives what decoding all pieces at once has more than those of the prompt. Held back is what
    ends in U+FFFD, which may become a character, and a run of single bytes up to its end: it is
    text, or a U+FFFD for each byte."""

    def __init__(self, table: Table, prompt: Sequence[int]) -> None:
        self._table, self._bytes = table, table.kind == BYTES
        self._held, self._open = "", b""  # text, and bytes that more may follow
        self._first = True
        for token in reversed(prompt):
            if table.is_silent(token):
                continue
            self._first = False
            if token not in table.byte_ids and not self._bytes:
                break
            self._open = table.piece(token) + self._open  # the prompt may end within a character
            if self._bytes and self._open:
                break
        self._given = len(self._text())

    def feed(self, token: int) -> str:
        table = self._table
        if table.is_silent(token):
            return ""
        if self._bytes:
            self._open += table.piece(token)
        elif token in table.byte_ids:
            self._open += table.piece(token)
            return ""
        else:
            self._held = self._text() + table.piece(token).decode("utf-8", "replace")
            self._open = b""
        text = self._text()
        return "" if text.endswith(REPLACEMENT) else self._give(text)

    def flush(self) -> str:
        return self._give(self._text())

    def _give(self, text: str) -> str:
        text = text[self._given :]
        if self._first:
            text = text[min(self._table.lead, len(text) - len(text.lstrip(" "))) :]
        self._held, self._open, self._given, self._first = "", b"", 0, False
        return text

    def _text(self) -> str:
        if self._bytes:
            return self._open.decode("utf-8", "replace")
        try:
            return self._held + self._open.decode()
        except UnicodeDecodeError:
            return self._held + REPLACEMENT * len(self._open)


class WindowDetokenizer:
    """The text of some last tokens with and without the new one: what one token adds depends on
    those before it. Held back as by the others."""

    def __init__(self, table: Table, prompt: Sequence[int], decode: Decode) -> None:
        self._table, self._decode = table, decode
        self._window, self._given = list(prompt), ""  # the text of the window that was given
        self.flush()

    def feed(self, token: int) -> str:
        if self._table.is_silent(token):
            return ""
        self._window.append(token)
        return "" if token in self._table.byte_ids else self._advance(ends=False)

    def flush(self) -> str:
        return self._advance(ends=True)

    def _advance(self, ends: bool) -> str:
        text, begin, last = self._decode(self._window)
        if text.endswith(REPLACEMENT) and not ends:
            return ""
        new = text[len(self._given) :]
        self._window, self._given = self._window[begin:], last
        return new
