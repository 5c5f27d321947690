"""Makes numpy's results independent of the number of processors."""

from __future__ import annotations

import os


def single_threaded_blas() -> None:
    """Let numpy multiply on one thread, as the engine's sandboxes do; call it before the import.

    The number of threads changes the order of sums, and so a delta's bits. Threads of the caller
    multiply different matrices beside each other, which takes less time, too.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
