"""Puts files out of the page cache, as after a restart of the machine, without being root."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from engine.backends.page_cache import present


def drop(folder: Path) -> float:
    """Asks the kernel to forget the files' pages; returns the share that stayed in memory.

    Pages that a process has mapped stay, so nothing may have the files open. The disk below, or
    the machine that emulates it, may have a cache of its own.
    """
    resident = total = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only clean pages can go
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = np.memmap(path, dtype=np.uint8, mode="r")
            results = present(mapped.ctypes.data, len(mapped))
            resident, total = resident + int(results.sum()), total + len(results)
    return resident / max(total, 1)
