from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import cpus


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in ("CGROUP_QUOTA", "CGROUP_QUOTA_V1", "CGROUP_PERIOD_V1"):
        monkeypatch.setattr(cpus, name, tmp_path / name)
    return tmp_path


def test_all_cores_of_the_affinity_where_nothing_limits_them(quota: Path) -> None:
    assert cpus.cpu_count() == 8
    (quota / "CGROUP_QUOTA").write_text("max 100000\n")
    assert cpus.cpu_count() == 8


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_a_quota_is_rounded_up_to_whole_cores(quota: Path, limit: str, cores: int) -> None:
    (quota / "CGROUP_QUOTA").write_text(limit + "\n")
    assert cpus.cpu_count() == cores


def test_version_one_of_cgroups_keeps_the_two_numbers_in_two_files(quota: Path) -> None:
    (quota / "CGROUP_PERIOD_V1").write_text("100000\n")
    (quota / "CGROUP_QUOTA_V1").write_text("-1\n")
    assert cpus.cpu_count() == 8
    (quota / "CGROUP_QUOTA_V1").write_text("300000\n")
    assert cpus.cpu_count() == 3
