"""Sets the order in which the kernel kills processes when memory runs out: `oom_score_adj`.

Raising a score needs no privileges. A score of 1000 weighs as much as all memory, so a model's
script or a sandbox is killed first, then a worker, then the gateway or Multi Model Server, and last
the engine, which holds all models.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

SERVER, WORKER, SCRIPT = 800, 900, 1000


def oom_score_adj(pid: int | str = "self") -> int:
    """Read a process's `oom_score_adj`. Raises `OSError` if the process has ended."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def expendable(score: int) -> None:
    """Raise this process's `oom_score_adj` to `score`, unless it is higher already."""
    with contextlib.suppress(OSError):
        if oom_score_adj() < score:
            Path("/proc/self/oom_score_adj").write_text(str(score))
