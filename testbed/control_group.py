"""A control group: processes with less memory, processor time and a slower disk. By root only.

A page is charged to the group that first reads it, so files must be out of the page cache before.
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
NAME = "kogpt2-benchmark-"  # and the id of the process that made it
EMPTY_S = 10.0
PERIOD_US = 20_000  # short, so that a stream does not stand still for long


class ControlGroup:
    """A context manager; `prefix` before a command puts what it runs into the group.

    Without limits there is no group, and `prefix` is empty.

    seen: what runs sees the group where a container sees its own
    cpus: so much processor time a second, as `docker run --cpus`
    """

    _made = itertools.count(1)

    def __init__(
        self,
        memory_mib: int = 0,
        read_mb_s: int | None = None,
        seen: bool = False,
        cpus: float | None = None,
    ) -> None:
        one = not (ROOT / "cgroup.controllers").exists()  # version 1 has a tree for each controller
        limits: list[tuple[str, str, str]] = []
        self._seen, self._memory = seen, str((memory_mib) << 20)
        if memory_mib:
            limits += [("memory", "memory.limit_in_bytes" if one else "memory.max", self._memory)]
        if read_mb_s is not None:
            rate = read_mb_s * 1_000_000
            file, line = ("blkio.throttle.read_bps_device", "") if one else ("io.max", "rbps=")
            limits += [("blkio", file, f"{_disk()} {line}{rate}")]
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
                with contextlib.suppress(OSError):  # the last process is about to go
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
            limit.write_text(self._memory)

    def page_ins(self) -> dict[str, int]:
        """Major faults, and pages that were read again soon after their eviction."""
        if not self._folders:
            return {}
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
