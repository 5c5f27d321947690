"""Shared by tests of backends: small models, and rows that are run by hand."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from engine.backends.interface import BackendModel, Piece

VOCAB = 500


def some_ids(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return ids


def append(model: BackendModel, row: Any, ids: list[int]) -> Any:
    """The logits (V,) after tokens that are appended to a row alone."""
    return model.run([Piece(row, ids)])[0].copy()


def single(model: BackendModel, calls: list[list[int]]) -> list[Any]:
    """The logits after each call, of a row that is alone."""
    row = model.open_row()
    logits = [append(model, row, ids) for ids in calls]
    model.close_row(row)
    return logits


def logits_of(model: BackendModel, ids: Sequence[int], adapter: Any = None) -> Any:
    """The logits (T, V) of all tokens of a row that is alone."""
    row = model.open_row()
    logits = model.run([Piece(row, ids, len(ids), adapter)]).copy()
    model.close_row(row)
    return logits


def greedy(model: BackendModel, ids: list[int], steps: int) -> list[int]:
    row, tokens = model.open_row(), list[int]()
    while len(tokens) < steps:
        tokens.append(int(append(model, row, tokens[-1:] or ids).argmax()))
    model.close_row(row)
    return tokens


@contextmanager
def address_space(free_bytes: int) -> Iterator[None]:
    """Limits this process's address space to what it has now and some more."""
    gc.collect()  # arenas of 64 GiB may be garbage: collected later, they would be free space
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + free_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def status_bytes(field: str) -> int:
    """A size of this process from /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{field}:"))
