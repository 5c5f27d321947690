"""Decode steps of rows that are measured in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backends.interface import Adapter, Piece
from engine.native.arena import NativeRow
from engine.native.model import NativeModel

CONTEXT = 40  # tokens behind each row of a step


def filled(model: NativeModel, adapter: Adapter | None = None) -> NativeRow:
    """Open a row with `CONTEXT` tokens."""
    row = model.open_row()
    ids = np.random.default_rng(0).integers(4, model.config.vocab_size, CONTEXT).tolist()
    model.run([Piece(row, ids, adapter=adapter)])
    return row


def decode_step(
    model: NativeModel, rows: Sequence[NativeRow], adapters: Sequence[Adapter | None]
) -> None:
    """Run a decode step, then truncate the rows to their length before."""
    model.run([Piece(row, [5], 1, a) for row, a in zip(rows, adapters, strict=True)])
    for row in rows:
        model.truncate(row, CONTEXT)
