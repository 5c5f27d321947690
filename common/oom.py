"""The order in which processes are killed when memory runs out: `oom_score_adj`.

Any user may raise it. 1000 weighs as much as all memory in use, so a model's script, or a sandbox,
is killed first, then a worker, then the gateway or Multi Model Server; the engine, which holds all
models, last.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

SERVER, WORKER, SCRIPT = 800, 900, 1000


def oom_score_adj(pid: int | str = "self") -> int:
    """The score of a process. Raises `OSError` if it has ended."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def expendable(score: int) -> None:
    """Raise this process's score to `score`, unless it is higher."""
    with contextlib.suppress(OSError):
        if oom_score_adj() < score:
            Path("/proc/self/oom_score_adj").write_text(str(score))
