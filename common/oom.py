"""Who goes first when memory runs out: `oom_score_adj`, which anybody may raise for his own.

1000 of it weigh as much as all memory in use. So a model's script, or what reads its files, goes
first, then a worker, then the gateway or Multi Model Server; the engine, which holds all models,
goes last.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

SERVER, WORKER, SCRIPT = 800, 900, 1000


def oom_score_adj(pid: int | str = "self") -> int:
    """Raises `OSError` for a process that is gone."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def expendable(score: int) -> None:
    """Raises this process's to `score`, or leaves it if it is above that already."""
    with contextlib.suppress(OSError):
        if oom_score_adj() < score:
            Path("/proc/self/oom_score_adj").write_text(str(score))
