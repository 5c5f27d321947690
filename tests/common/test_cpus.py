"""The cores that this process may use: of the affinity, within the control group's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common import cpus

FILES = ("CGROUP_QUOTA", "CGROUP_QUOTA_V1", "CGROUP_PERIOD_V1")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ([], 8),
        (["max 100000"], 8),
        (["200000 100000"], 2),
        (["150000 100000"], 2),  # rounded up
        (["50000 100000"], 1),
        (["1600000 100000"], 8),
        ([None, "-1", "100000"], 8),  # version 1 of control groups has two files
        ([None, "300000", "100000"], 3),
    ],
)
def test_cores_are_those_of_the_affinity_and_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str | None], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, content in zip(FILES, [*files, None, None, None], strict=False):
        monkeypatch.setattr(cpus, name, tmp_path / name)
        if content is not None:
            (tmp_path / name).write_text(content + "\n")
    assert cpus.cpu_count() == cores
