"""What the entrypoint counts, in a small mapped file of RUN_DIR from which `/metrics` shows it."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path

PROCESSES = {
    "the engine": "engine",
    "the workers' host": "host",
    "Multi Model Server": "mms",
    "the gateway": "gateway",
}  # by the names that the log has
DROPPED = "dropped log lines"
NAMES = (*PROCESSES, DROPPED)
FORMAT = struct.Struct(f"={len(NAMES)}Q")


class Counts:
    """For the entrypoint. Each name is counted by one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        """All begin at 0."""
        path = _path(run_dir)
        path.write_bytes(bytes(FORMAT.size))  # a disk that is full later does not matter
        file = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(file, FORMAT.size)
        finally:
            os.close(file)

    def add(self, name: str, count: int = 1) -> None:
        offset = 8 * NAMES.index(name)
        (before,) = struct.unpack_from("=Q", self._map, offset)
        struct.pack_into("=Q", self._map, offset, before + count)


def read_counts(run_dir: Path | None) -> dict[str, int]:
    """By name; all are 0 where no entrypoint has started this process."""
    found = dict.fromkeys(NAMES, 0)
    if run_dir is not None:
        with contextlib.suppress(OSError, struct.error):
            found.update(zip(NAMES, FORMAT.unpack(_path(run_dir).read_bytes()), strict=True))
    return found


def _path(run_dir: Path) -> Path:
    return run_dir / "counts"
