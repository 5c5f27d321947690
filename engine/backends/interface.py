"""The interface of a backend, which runs one model.

A backend computes passes only: requests, sampling and fairness are outside of it. One thread calls
`run`, one pass at a time; any thread may open and close rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest, PromptTooLong
from engine.artifacts.config import GPT2Config
from engine.backends.page_cache import Span

Logits = NDArray[np.float32]


class Row(Protocol):
    """The keys and values of one sequence, opened and closed by its model."""

    @property
    def length(self) -> int: ...  # tokens

    @property
    def num_bytes(self) -> int: ...


class Adapter(Protocol):
    """The weights of an adapter in memory; the native library reads them at `address`."""

    address: int
    num_bytes: int
    more: int  # tokens that it adds to the base's vocabulary

    def is_lost(self) -> bool: ...  # whether it cannot be read, so that results of it are wrong

    def read_in(self) -> None: ...

    def advise_cold(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Piece:
    """Tokens that a pass appends to a row; logits are wanted after the last `num_logits` of them.

    In their place `num_states` are the hidden states (num_states, units) after the last LayerNorm,
    for a head of the row's own; `run` stores them in `states`. All tokens of a row are computed
    with the same adapter, or with none.
    """

    row: Row
    ids: Sequence[int]
    num_logits: int = 1
    adapter: Adapter | None = None
    num_states: int = 0
    states: Logits | None = None

    def vocab_size(self, config: GPT2Config) -> int:
        """Return how many tokens the row's model has, by the configuration of its base."""
        return config.vocab_size + (0 if self.adapter is None else self.adapter.more)


class WeightsLost(Exception):
    """A pass is void, because mapped weights could not be read: the file was cut off, for example.

    They are those of `adapters` or, without any, the model's own.
    """

    def __init__(self, adapters: Collection[Adapter] = ()) -> None:
        super().__init__("a prepared file was cut off or could not be read")
        self.adapters = adapters


class BackendModel(ABC):
    """A model that is loaded on a backend."""

    config: GPT2Config
    weight_bytes: int  # resident bytes of the weights
    max_rows: int  # most rows that may be open at the same time
    caches_rows: bool  # whether rows may stay open for the prefix cache
    checks_guesses = False  # whether a few tokens of a row take little more time than one
    mapped: Sequence[Span] = ()  # spans of the weights that are mapped files

    @abstractmethod
    def open_row(self, source: Row | None = None, length: int = 0) -> Row:
        """Open a row that begins with the first `length` tokens of `source`."""

    @abstractmethod
    def truncate(self, row: Row, length: int) -> None:
        """Shorten a row to its first `length` tokens."""

    @abstractmethod
    def close_row(self, row: Row) -> None:
        """Close a row and free its memory."""

    @abstractmethod
    def run(self, pieces: Sequence[Piece]) -> Logits:
        """Append pieces, each to a row of its own; return the logits (N, V) in their order.

        V is that of the piece with the most tokens: what a row has beyond its own has no meaning.
        The next call overwrites the array. The logits of a token do not depend on the other pieces.
        Raises `OutOfMemory`, `InvalidRequest`, `PromptTooLong`, and `WeightsLost`; then no row has
        changed.
        """

    @abstractmethod
    def kv_bytes_for(self, lengths: Sequence[int]) -> int:
        """Return the K/V bytes of rows of these lengths."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; the model cannot be used afterwards."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Resident K/V bytes of all rows."""


def check_ids(config: GPT2Config, piece: Piece) -> None:
    """Raise `InvalidRequest` for unknown ids, `PromptTooLong` beyond the context."""
    end, vocab_size = piece.row.length + len(piece.ids), piece.vocab_size(config)
    if end > config.max_length:
        raise PromptTooLong(f"{end} tokens do not fit the {config.max_length} of the model")
    if min(piece.ids) < 0 or max(piece.ids) >= vocab_size:
        raise InvalidRequest(f"token ids must be from 0 to {vocab_size - 1}")
