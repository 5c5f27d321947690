"""The small interface behind which each backend runs one model.

A backend computes; it knows nothing of requests, sampling or fairness. The rows of a running batch
are 0..rows-1 without holes. Rows may have different lengths. All calls for one model come from one
thread, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest, PromptTooLong
from engine.artifacts.config import GPT2Config
from engine.backends.page_cache import Span

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


# Tokens of a prompt that are computed at once, each time from a multiple of it.
CHUNK = {"cpu": 64, "gpu": 256}


class Kept(Protocol):
    """Keys and values of the beginning of a row, outside the batch, as long as it is held."""

    @property
    def num_bytes(self) -> int: ...


class KVCache(Protocol):
    """Keys and values of the rows of a running batch."""

    lengths: list[int]  # of each row, in tokens

    @property
    def num_bytes(self) -> int: ...

    def num_bytes_for(self, lengths: Sequence[int]) -> int: ...

    def add_row(self) -> int: ...

    def move_row(self, source: int, target: int) -> None: ...

    def copy_row(self, source: int, target: int, length: int) -> None: ...

    def keep_row(self, row: int, length: int) -> Any: ...

    def fill_row(self, row: int, kept: Any, length: int, last: bool) -> None: ...

    def remove_last_row(self) -> None: ...


class BackendModel(ABC):
    """One loaded model and the K/V cache of its running batch."""

    config: GPT2Config
    weight_bytes: int  # resident bytes of the weights
    kv_bytes_per_token: int  # of the cache
    max_rows: int
    # Keys and values of a multiple of so many tokens are the same, bit for bit, whatever follows
    # them, where at least two tokens are computed at once, each time from a multiple of it.
    piece: int
    keeps: bool  # whether it has `keep_row`
    mapped: Sequence[Span] = ()  # its weights, where they are mapped files and not its memory
    _cache: KVCache

    @abstractmethod
    def extend(self, row: int, ids: Ids) -> Logits:
        """Prefill: appends `ids` (T,) to one row; returns the logits (V,) after the last."""

    @abstractmethod
    def decode(self, ids: Ids) -> Logits:
        """Appends ids[i] to row i for the first B = len(ids) rows; returns their logits (B, V).

        The array may be reused by the next call. Rows from B on are left as they are.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees everything; the model cannot be used afterwards."""

    def add_row(self) -> int:
        """Opens an empty row behind the last one; returns its index."""
        return self._cache.add_row()

    def move_row(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is."""
        self._cache.move_row(source, target)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """An empty row `target` becomes what the first `length` tokens of row `source` are."""
        self._cache.copy_row(source, target, length)

    def keep_row(self, row: int, length: int) -> Kept:
        """Takes the first `length` tokens out of the batch; the row has nothing then."""
        kept: Kept = self._cache.keep_row(row, length)
        return kept

    def fill_row(self, row: int, kept: Kept, length: int, last: bool) -> None:
        """An empty row becomes what the first `length` tokens were that were kept. With `last`
        nobody wants these any more: they may be taken."""
        self._cache.fill_row(row, kept, length, last)

    def remove_last_row(self) -> None:
        """Closes the last row and gives back its memory."""
        self._cache.remove_last_row()

    def length(self, row: int) -> int:
        """How many tokens the row's cache holds."""
        return self._cache.lengths[row]

    def kv_bytes_for(self, lengths: Sequence[int]) -> int:
        """What the cache will take once the rows that are open now have grown to `lengths`."""
        return self._cache.num_bytes_for(lengths)

    @property
    def kv_bytes(self) -> int:
        """Resident bytes of keys and values."""
        return self._cache.num_bytes


def check_ids(config: GPT2Config, ids: Ids, end: int) -> None:
    """Raises unless the model has these ids, and room for a row of `end` tokens."""
    if end > config.max_length:
        raise PromptTooLong(f"{end} tokens do not fit the {config.max_length} of the model")
    # numpy would take a negative id from the end of the table.
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise InvalidRequest(f"token ids must be from 0 to {config.vocab_size - 1}")
