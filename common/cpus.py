"""The number of cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # version 2: "200000 100000" or "max 100000"
CGROUP_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CGROUP_PERIOD_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def cpu_count() -> int:
    """Count the cores of the process's affinity, limited by its cgroup (`docker run --cpus`)."""
    cores = len(os.sched_getaffinity(0))
    for quota_files in ((CGROUP_QUOTA,), (CGROUP_QUOTA_V1, CGROUP_PERIOD_V1)):
        try:
            quota, period = " ".join(file.read_text("ascii") for file in quota_files).split()
            if int(quota) > 0:
                return max(1, min(cores, math.ceil(int(quota) / int(period))))
        except (OSError, ValueError):  # the file is absent, or holds `max`
            continue
    return cores
