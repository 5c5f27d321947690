"""Measures how fast all cores together read memory: the lower bound of a decode step's time.

Reads an array far larger than any cache, on one thread per core, with several of
numpy's reductions, since each of them may be held up by its arithmetic instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.worker import Started

CHUNK = 1 << 18
TRIES = 5
KERNELS: dict[str, Callable[[Any], Any]] = {
    "add": np.add.reduce,
    "dot": lambda x: np.dot(x, x),
    "or": lambda x: np.bitwise_or.reduce(x.view(np.int64)),
}


def start(floats: str) -> Started:
    size = int(floats)
    array = np.zeros(size, dtype=np.float32)
    array[:] = 1e-3
    cores = len(os.sched_getaffinity(0))
    chunks = [array[i : i + CHUNK] for i in range(0, size, CHUNK)]
    share = -(-len(chunks) // cores)
    lanes = [chunks[i : i + share] for i in range(0, len(chunks), share)]
    pool = ThreadPoolExecutor(cores)

    def measure() -> dict[str, float]:
        """Return the bytes per second of each kernel, the best of several tries."""
        results = {}
        for name, kernel in KERNELS.items():
            seconds = []
            for _ in range(TRIES):
                began = time.perf_counter()
                list(pool.map(lambda lane: [kernel(x) for x in lane], lanes))  # noqa: B023
                seconds.append(time.perf_counter() - began)
            results[name] = array.nbytes / min(seconds)
        return results

    return {"threads": cores, "array_bytes": array.nbytes}, {"measure": measure}
