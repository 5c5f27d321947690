"""Limits the memory, processor time and disk rate of processes by a control group, as root.

A cached page is charged to the group that first reads it, so drop files from the page cache before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from testbed.process import ProgramError

ROOT = Path("/sys/fs/cgroup")
NAME = "kogpt2-benchmark-"  # followed by the id of the process that creates it
EMPTY_S = 10.0  # limit for the group's last process to end, on exit
PERIOD_US = 20_000  # short, so that throttled processes stop only briefly


class ControlGroup:
    """A temporary control group; a command that follows `prefix` runs in it.

    Without limits no group is created, and `prefix` is empty.

    read_mb_s: rate of reads from the disk that has the folder `store`
    seen: mount the group where a container finds its own, so that the command sees its limits
    cpus: seconds of processor time per second, as in `docker run --cpus`
    """

    _made = itertools.count(1)

    def __init__(
        self,
        memory_mib: int = 0,
        read_mb_s: int | None = None,
        seen: bool = False,
        cpus: float | None = None,
        store: Path = Path(),
    ) -> None:
        one = not (ROOT / "cgroup.controllers").exists()  # version 1 has a tree for each controller
        limits: list[tuple[str, str, str]] = []
        self._seen, self._memory = seen, str((memory_mib) << 20)
        if memory_mib:
            limits += [("memory", "memory.limit_in_bytes" if one else "memory.max", self._memory)]
        if read_mb_s is not None:
            rate = read_mb_s * 1_000_000
            file, line = ("blkio.throttle.read_bps_device", "") if one else ("io.max", "rbps=")
            limits += [("blkio", file, f"{_disk(store)} {line}{rate}")]
        if cpus is not None and one:
            limits += [("cpu", "cpu.cfs_period_us", str(PERIOD_US))]
            limits += [("cpu", "cpu.cfs_quota_us", str(int(PERIOD_US * cpus)))]
        elif cpus is not None:
            limits += [("cpu", "cpu.max", f"{int(PERIOD_US * cpus)} {PERIOD_US}")]
        name = f"{NAME}{os.getpid()}-{next(self._made)}"
        self._limits = {
            (ROOT / controller if one else ROOT) / name / file: setting
            for controller, file, setting in limits
        }
        self._folders = [*dict.fromkeys(file.parent for file in self._limits)]

    def __enter__(self) -> ControlGroup:
        try:
            for folder in self._folders:
                folder.mkdir()
            for file, setting in self._limits.items():
                file.write_text(setting)
        except OSError as error:
            self.__exit__()
            raise ProgramError(f"no control group: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._folders:
            end = time.monotonic() + EMPTY_S
            while folder.exists() and time.monotonic() < end:
                with contextlib.suppress(OSError):  # a process is still ending
                    folder.rmdir()
                time.sleep(0.02)

    @property
    def prefix(self) -> list[str]:
        if not self._folders:
            return []
        joining = "".join(f"echo $$ > {folder / 'cgroup.procs'}; " for folder in self._folders)
        if not self._seen:
            return ["/bin/sh", "-c", f'{joining}exec "$@"', "sh"]
        for folder in self._folders:
            joining += f"mount --bind {folder} {folder.parent}; "
        return ["unshare", "--mount", "/bin/sh", "-ec", f'{joining}exec "$@"', "sh"]

    @contextlib.contextmanager
    def limited(self, left_bytes: int) -> Iterator[None]:
        """Limit the group's memory to its present usage plus `left_bytes` inside the context."""
        folder = self._folders[0]
        two = (folder / "memory.max").exists()
        limit = folder / ("memory.max" if two else "memory.limit_in_bytes")
        usage = folder / ("memory.current" if two else "memory.usage_in_bytes")
        with contextlib.suppress(OSError):  # usage has grown beyond the limit
            limit.write_text(str(int(usage.read_text()) + left_bytes))
        try:
            yield
        finally:
            limit.write_text(self._memory)

    def page_ins(self) -> dict[str, int]:
        """Count major faults and refaults: pages read again soon after the kernel dropped them."""
        if not self._folders:
            return {}
        rows = (self._folders[0] / "memory.stat").read_text(encoding="ascii").splitlines()
        counts = {key: int(value) for key, _, value in (row.partition(" ") for row in rows)}
        names = ("pgmajfault", "workingset_refault_file", "workingset_refault")
        return {name: counts[name] for name in names if name in counts}


def _disk(folder: Path) -> str:
    """Return MAJOR:MINOR of a folder's disk. Partitions have no limits."""
    device = folder.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    return (disk / "dev").read_text(encoding="ascii").strip()
