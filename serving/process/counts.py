"""Counters of the entrypoint, in a small mapped file of RUN_DIR that `/metrics` reads."""

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
}  # label in the metrics, by name in the log
DROPPED = "dropped log lines"
NAMES = (*PROCESSES, DROPPED)
FORMAT = struct.Struct(f"={len(NAMES)}Q")


class Counts:
    """The writer's side, all counters 0. No two threads may add to the same name."""

    def __init__(self, run_dir: Path) -> None:
        path = _path(run_dir)
        path.write_bytes(bytes(FORMAT.size))  # now: a disk that fills up later does no harm
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
    """The counters by name; all 0 where no entrypoint has started this process."""
    counts = dict.fromkeys(NAMES, 0)
    if run_dir is not None:
        with contextlib.suppress(OSError, struct.error):
            counts.update(zip(NAMES, FORMAT.unpack(_path(run_dir).read_bytes()), strict=True))
    return counts


def _path(run_dir: Path) -> Path:
    return run_dir / "counts"
