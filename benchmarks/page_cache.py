"""Puts files out of the page cache, as after a restart of the machine, without being root."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from engine.backends.page_cache import present


def drop(files: Iterable[Path]) -> float:
    """Asks the kernel to forget the files' pages; returns the share that stayed in memory.

    Pages that a process has mapped stay, so nothing may have the files open. The disk below, or
    the machine that emulates it, may have a cache of its own.
    """
    resident = total = 0
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages can go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        here, pages = residency(path)
        resident, total = resident + here, total + pages
    return resident / max(total, 1)


def residency(path: Path) -> tuple[int, int]:
    """How many pages of a file are in memory, and how many it has."""
    size = path.stat().st_size
    if not size:
        return 0, 0
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    found = present(mapped.ctypes.data, size)
    return int(found.sum()), len(found)
