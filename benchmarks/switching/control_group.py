"""Processes with less memory and a slower disk, as in a small container: a control group, by root.

A page is charged to the group that first reads it, so files must be out of the page cache before.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.process import BenchmarkError

ROOT = Path("/sys/fs/cgroup")
EMPTY_S = 10.0


class ControlGroup:
    """A context manager; `prefix` before a command puts what it runs into the group.

    seen: what runs sees the group where a container sees its own
    """

    def __init__(self, memory_mib: int, read_mb_s: int | None = None, seen: bool = False) -> None:
        self._limits, self._seen = (memory_mib << 20, read_mb_s), seen
        one = not (ROOT / "cgroup.controllers").exists()
        parents = [ROOT / "memory", ROOT / "blkio"] if one else [ROOT]
        self._folders = [parent / f"kogpt2-benchmark-{os.getpid()}" for parent in parents]

    def __enter__(self) -> ControlGroup:
        memory_bytes, read_mb_s = self._limits
        try:
            for folder in self._folders:
                folder.mkdir()
            if len(self._folders) == 2:
                memory, disk = self._folders
                (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
                rate = (disk / "blkio.throttle.read_bps_device", "{} {}")
            else:
                (memory,) = self._folders
                (memory / "memory.max").write_text(str(memory_bytes))
                rate = (memory / "io.max", "{} rbps={}")
            if read_mb_s is not None:
                file, line = rate
                file.write_text(line.format(_disk(), read_mb_s * 1_000_000))
        except OSError as error:
            self.__exit__()
            raise BenchmarkError(f"no control group: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._folders:
            end = time.monotonic() + EMPTY_S
            while folder.exists() and time.monotonic() < end:
                with contextlib.suppress(OSError):  # the last process is about to go
                    folder.rmdir()
                time.sleep(0.02)

    @property
    def prefix(self) -> list[str]:
        joining = "".join(f"echo $$ > {folder / 'cgroup.procs'}; " for folder in self._folders)
        if not self._seen:
            return ["/bin/sh", "-c", f'{joining}exec "$@"', "sh"]
        memory = self._folders[0]
        joining += f"mount --bind {memory} {memory.parent}; "
        return ["unshare", "--mount", "/bin/sh", "-ec", f'{joining}exec "$@"', "sh"]

    @contextlib.contextmanager
    def limited(self, left_bytes: int) -> Iterator[None]:
        """Meanwhile, its processes may take so much beside what they use, and no more."""
        folder = self._folders[0]
        two = (folder / "memory.max").exists()
        limit = folder / ("memory.max" if two else "memory.limit_in_bytes")
        usage = folder / ("memory.current" if two else "memory.usage_in_bytes")
        with contextlib.suppress(OSError):  # more is used by now
            limit.write_text(str(int(usage.read_text()) + left_bytes))
        try:
            yield
        finally:
            limit.write_text(str(self._limits[0]))

    def page_ins(self) -> dict[str, int]:
        """Major faults and pages that were read again soon after they had been let go."""
        rows = (self._folders[0] / "memory.stat").read_text(encoding="ascii").splitlines()
        counts = {key: int(value) for key, _, value in (row.partition(" ") for row in rows)}
        names = ("pgmajfault", "workingset_refault_file", "workingset_refault")
        return {name: counts[name] for name in names if name in counts}


def _disk() -> str:
    """The numbers of the disk that the temporary files are on: limits are for whole disks."""
    device = os.stat(Path.cwd()).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return (folder / "dev").read_text(encoding="ascii").strip()
