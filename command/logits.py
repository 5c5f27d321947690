"""Computes single rows of a model, to compare it with another. Shapes: T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.backends.interface import Adapter, BackendModel, Logits, Piece


def logits_after(
    model: BackendModel, ids: Sequence[int], count: int = 1, adapter: Adapter | None = None
) -> Logits:
    """Return the logits (count, V) after each of the last `count` of `ids`."""
    row = model.open_row()
    result = model.run([Piece(row, ids, count, adapter)]).copy()
    model.close_row(row)
    return result


def greedy(
    model: BackendModel,
    prompt: Sequence[int],
    new_tokens: int,
    eos: int | None = None,
    adapter: Adapter | None = None,
) -> list[int]:
    """Decode greedily; return the new ids, up to and including `eos`."""
    row, new = model.open_row(), list[int]()
    while len(new) < new_tokens and new[-1:] != [eos]:
        logits = model.run([Piece(row, new[-1:] or prompt, adapter=adapter)])
        new.append(int(logits[0].argmax()))
    model.close_row(row)
    return new


def divergence(exact: Logits, other: Logits) -> float:
    """Return the Kullback-Leibler divergence of logits (T, V), in nats, summed over the tokens."""
    p, q = _log_softmax(exact), _log_softmax(other)
    return float((np.exp(p) * (p - q)).sum())


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    x = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]
