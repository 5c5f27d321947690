"""Texts that are classified: the last token's hidden state, or each token's, goes into a head."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from engine.artifacts.adapter import Adapter
from engine.artifacts.artifact import Artifact
from engine.artifacts.classifier import BIAS, WEIGHT, Classifier
from engine.artifacts.tensor_index import read_tensor
from engine.backends.interface import BackendModel, Logits, Piece, Row
from engine.native import library
from engine.sampling import check_finite
from engine.sequence import Scheduled, Sequence


class Head:
    """The head of a classifier, in fp32 whatever the model's precision is."""

    def __init__(
        self, classifier: Classifier, weight: NDArray[Any], bias: NDArray[Any] | None = None
    ) -> None:
        """`weight` (labels, units), `bias` (labels,)."""
        self.classifier = classifier
        self._weight = np.array(weight, np.float32, order="C")
        self._bias = np.zeros(len(weight), np.float32) if bias is None else bias.astype(np.float32)

        self.num_bytes = self._weight.nbytes + self._bias.nbytes

    def logits(self, states: Logits) -> Logits:
        """Return the logits (T, labels) of hidden states (T, units), each row by itself."""
        logits = np.tile(self._bias, (len(states), 1))
        for state, row in zip(np.ascontiguousarray(states, np.float32), logits, strict=True):
            addresses = self._weight.ctypes.data, state.ctypes.data
            library.add_products(*addresses, *self._weight.shape, row.ctypes.data)
        return logits


def head_of(source: Artifact | Adapter) -> Head:
    """Read the head of a classifier. Raises `ArtifactError` if its file has changed."""
    assert source.classifier is not None
    tensors = {
        name: read_tensor(source.path, name, source.index[name])
        for name in (WEIGHT, BIAS)
        if name in source.index
    }
    return Head(source.classifier, tensors[WEIGHT], tensors.get(BIAS))


def head_bytes(source: Artifact | Adapter) -> int:
    """Return the bytes of the head that `head_of` reads."""
    labels, units = source.index[WEIGHT].shape
    return 4 * labels * (units + 1)


@dataclass(frozen=True)
class EncodedText:
    """The ids of a text to classify, and perhaps its tokens' places.

    begins, ends: the characters of each token, which for special tokens do not count
    special: 1 for each token that the tokenizer added to the text
    """

    ids: list[int]
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    special: list[int] = field(default_factory=list)


def without_padding(ids: list[int], pad_id: int) -> list[int]:
    """Return the ids up to the last that is no padding, or the first id of padding alone."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


@dataclass
class Outputs:
    """The logits of a text, (1, labels), or of each of its tokens, (T, labels)."""

    index: int
    logits: list[list[float]]
    finish_reason: str = "complete"


@dataclass(eq=False, kw_only=True)
class Classification(Sequence):
    """A text whose labels are computed. Its keys and values are not kept."""

    head: Head
    encoded: EncodedText
    _logits: list[list[float]] = field(init=False, default_factory=list)

    caches_prefix: ClassVar[bool] = False
    is_bulk: ClassVar[bool] = True

    @property
    def max_tokens(self) -> int:
        return len(self.prompt)

    def next_parts(self, row: Row, most: int, model: BackendModel, alone: bool) -> list[Scheduled]:
        end = min(row.length + most, len(self.ids))
        completes = end == len(self.ids)
        states = end - row.length if self.head.classifier.of_tokens else int(completes)
        ids = self.ids[row.length : end]
        return [Scheduled(self, Piece(row, ids, 0, self.adapter, states), completes)]

    def take(self, part: Scheduled, logits: Logits, model: BackendModel) -> bool:
        if part.piece.states is not None:
            logits = self.head.logits(part.piece.states)
            check_finite(float(np.abs(logits).max()))
            self._logits += logits.tolist()
        if part.completes:
            self.finish()
            self.send(Outputs(self.index, self._logits))
            now, statistics = time.monotonic(), self.model.statistics
            statistics.texts += 1
            statistics.time_to_first_token_s.observe(now - self.received_at)
            statistics.finished(now - self.queued_at)
        return False
