"""The entrypoint's counters, in a mapped file in RUN_DIR that the gateway reads for `/metrics`."""

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
}  # labels in the metrics, by the names in the log
DROPPED = "dropped log lines"
NAMES = (*PROCESSES, DROPPED)
FORMAT = struct.Struct(f"={len(NAMES)}Q")


class Counts:
    """Creates and increments the counters. Two threads must not increment the same counter."""

    def __init__(self, run_dir: Path) -> None:
        path = _path(run_dir)
        path.write_bytes(bytes(FORMAT.size))  # written now: later the disk may be full
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
    """Read the counters by name; all are 0 if there is no file, as without an entrypoint."""
    counts = dict.fromkeys(NAMES, 0)
    if run_dir is not None:
        with contextlib.suppress(OSError, struct.error):
            counts.update(zip(NAMES, FORMAT.unpack(_path(run_dir).read_bytes()), strict=True))
    return counts


def _path(run_dir: Path) -> Path:
    return run_dir / "counts"
