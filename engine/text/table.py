"""A tokenizer's table: the bytes of each id, with which the engine decodes ids itself.

The text process makes and checks the table, and returns it as untrusted data.
"""

from __future__ import annotations

import base64
import codecs
import functools
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

REPLACEMENT = "\ufffd"
# How pieces become a text.
SEPARATE = "separate"  # decoded one by one, as in v1's guides; a piece ends an open character
BYTES = "bytes"  # all pieces are joined, and the whole is decoded
RUNS = "runs"  # pieces are texts; a run of single bytes is decoded as a whole
PROCESS = ""  # not by joining pieces: the text process decodes
KINDS = (SEPARATE, BYTES, RUNS, PROCESS)
ALL_SPACES = 1 << 16

# Takes ids; returns their text, the index of the last ids that have a text, and that text.
Decode = Callable[[list[int]], tuple[str, int, str]]


class Detokenizer(Protocol):
    """Turns the ids of a sequence into text one by one, for a stream."""

    def feed(self, token: int) -> str:
        """Return the text that `token` completes: often its whole piece, sometimes nothing."""

    def flush(self) -> str:
        """Return the text that is still buffered, an incomplete character as U+FFFD."""


class Table:
    """Each id's piece: its bytes in a text, or the name of a control token.

    silent: ids that are no text, such as `<s>`
    byte_ids: ids that are one byte of a character
    lead: how many leading spaces of a text's first piece are dropped at most
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
        """The joined bytes of the ids that are text."""
        return b"".join(self.piece(i) for i in ids if i not in self.silent)

    @functools.cached_property
    def _sorted(self) -> tuple[list[bytes], NDArray[np.uint32]]:
        """The pieces that are text, sorted, and their ids: 3 MB for 50,000, in 50 ms."""
        texts = [(piece, i) for i, piece in enumerate(self.pieces()) if i not in self.silent]
        texts.sort()
        return [piece for piece, _ in texts], np.array([i for _, i in texts], np.uint32)

    @functools.cached_property
    def longest(self) -> int:
        """The length of the longest piece that is text, in bytes."""
        return max(map(len, self._sorted[0]), default=0)

    @functools.cached_property
    def _heads(self) -> NDArray[np.uint32]:
        """The three bytes from each position in `_blob` on, as a big-endian number."""
        blob = np.frombuffer(self._blob + bytes(2), np.uint8).astype(np.uint32)
        return np.asarray(blob[:-2] << 16 | blob[1:-1] << 8 | blob[2:], np.uint32)

    def beginning(self, text: bytes) -> NDArray[np.uint32]:
        """The ids whose pieces begin with `text`, which does not end in 0xFF."""
        pieces, ids = self._sorted
        first = bisect_left(pieces, text)
        return ids[first : bisect_left(pieces, text[:-1] + bytes([text[-1] + 1]), first)]

    def holding(self, text: bytes) -> list[int]:
        """The ids whose pieces contain `text`."""
        head, ends = text[:3], np.frombuffer(self._ends, np.uint32)
        places = self._heads >> 8 * (3 - len(head)) == int.from_bytes(head, "big")
        at = np.flatnonzero(places)  # `bytes.find` takes five times as long
        tokens = np.searchsorted(ends, at, side="right") - 1
        whole = at + len(text) <= ends[tokens + 1]
        pairs = zip(tokens[whole].tolist(), at[whole].tolist(), strict=True)
        blob, silent = self._blob, self.silent
        return [i for i, a in pairs if i not in silent and blob.startswith(text, a)]

    def detokenizer(self, prompt: Sequence[int], decode: Decode) -> Detokenizer:
        """Return a detokenizer for the ids after `prompt`; only kind `PROCESS` calls `decode`."""
        if self.kind == SEPARATE:
            return SeparateDetokenizer(self)
        if self.kind == PROCESS:
            return WindowDetokenizer(self, prompt, decode)
        return JoinedDetokenizer(self, prompt)

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids that begin a text, for a table that is not of kind `PROCESS`."""
        detokenizer = self.detokenizer([], lambda _: ("", 0, ""))
        return "".join(map(detokenizer.feed, ids)) + detokenizer.flush()

    def pieces(self) -> Iterator[bytes]:
        """The pieces of all ids in order."""
        return (self._blob[a:b] for a, b in pairwise(self._ends))

    def to_json(self) -> dict[str, Any]:
        lengths = [b - a for a, b in pairwise(self._ends)]
        pieces = base64.b64encode(self._blob).decode()
        ids = {"silent": sorted(self.silent), "byte_ids": sorted(self.byte_ids)}
        return {"kind": self.kind, "pieces": pieces, "lengths": lengths, **ids, "lead": self.lead}

    @classmethod
    def from_json(cls, value: Any) -> Table:
        """The inverse of `to_json`. Raises `KeyError`, `TypeError`, `ValueError`."""
        blob = base64.b64decode(value["pieces"], validate=True)
        lengths, lead = value["lengths"], value["lead"]
        if not are_ids([*lengths, lead], len(blob) + ALL_SPACES) or sum(lengths) != len(blob):
            raise ValueError("no pieces")
        pieces = [blob[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
        silent, byte_ids = value["silent"], value["byte_ids"]
        if value["kind"] not in KINDS or not are_ids([*silent, *byte_ids], len(pieces)):
            raise ValueError("no table")
        return cls(value["kind"], pieces, silent, byte_ids, lead)


def are_ids(values: Any, end: int) -> TypeGuard[list[int]]:
    """Return whether a value from a text process is a list of integers from 0 to `end - 1`."""
    return isinstance(values, list) and all(type(i) is int and 0 <= i < end for i in values)


class SeparateDetokenizer:
    """Decodes pieces one by one; byte pieces are buffered until they are whole characters."""

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
    """Decodes the joined pieces of prompt and answer, and returns the new text.

    Text that ends in U+FFFD is buffered, because more bytes may complete the character. A run of
    single bytes is buffered up to its end: if it is no valid UTF-8, each byte becomes a U+FFFD.
    """

    def __init__(self, table: Table, prompt: Sequence[int]) -> None:
        self._table, self._bytes = table, table.kind == BYTES
        self._held, self._open = "", b""  # buffered: text, and bytes that others may complete
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
        self._sent = len(self._text())

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
        return "" if text.endswith(REPLACEMENT) else self._send(text)

    def flush(self) -> str:
        return self._send(self._text())

    def _send(self, text: str) -> str:
        text = text[self._sent :]
        if self._first:
            text = text[min(self._table.lead, len(text) - len(text.lstrip(" "))) :]
        self._held, self._open, self._sent, self._first = "", b"", 0, False
        return text

    def _text(self) -> str:
        if self._bytes:
            return self._open.decode("utf-8", "replace")
        try:
            return self._held + self._open.decode()
        except UnicodeDecodeError:
            return self._held + REPLACEMENT * len(self._open)


class WindowDetokenizer:
    """Decodes the last tokens with and without the new one, and returns the difference.

    For tokenizers where a token's text depends on the tokens before it. Incomplete characters are
    buffered.
    """

    def __init__(self, table: Table, prompt: Sequence[int], decode: Decode) -> None:
        self._table, self._decode = table, decode
        self._window, self._sent = list(prompt), ""  # the window's text that was returned
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
        new = text[len(self._sent) :]
        self._window, self._sent = self._window[begin:], last
        return new
