"""Removes files in RUN_DIR that workers and Multi Model Server no longer use."""

from __future__ import annotations

import contextlib
from pathlib import Path

SOCKETS = Path("/proc/net/unix")
LISTENING = "00010000"  # __SO_ACCEPTCON in the column of flags


def unix_sockets() -> list[tuple[str, bool]]:
    """Return the path of each unix socket of the machine, with true if it listens."""
    lines = SOCKETS.read_text(encoding="utf-8", errors="replace").splitlines()
    columns = (line.split(maxsplit=7) for line in lines[1:])
    return [(c[7], c[3] == LISTENING) for c in columns if len(c) == 8]


def remove_leftovers(run_dir: Path) -> None:
    """Remove socket files of exited workers and MMS's output files.

    MMS leaves a socket for each load and two empty files for each connection (see
    `handlers.mms_connection`). Sockets are not tested by connecting, because a worker would take
    the connection for MMS's.
    """
    files = list(run_dir.glob(".mms.sock.*"))
    used = {path for path, _ in unix_sockets()} if files else set()
    unused = [file for file in files if str(file) not in used]
    for file in (*unused, *run_dir.glob("*-stdout"), *run_dir.glob("*-stderr")):
        with contextlib.suppress(OSError):
            file.unlink()
