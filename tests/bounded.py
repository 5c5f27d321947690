"""Limits how much memory a test's code may take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

TIMES_BYTES = 500


@contextmanager
def bounded(length: int, free_bytes: int) -> Iterator[None]:
    """Fails if more is taken inside than an input of this length may cost."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < free_bytes + TIMES_BYTES * length, f"{peak} bytes for {length}"
