"""Room in the container, as control groups of either version tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.memory import MIB, Memory, container_memory
from serving.errors import InsufficientStorage
from serving.models.worker_memory import check_worker_memory

LIMIT = 1024 * MIB


def cgroup(folder: Path, version: int, limit: object, used: int, cached: int) -> Path:
    """`used` without the page cache, `cached` one half active and one half not."""
    half = cached // 2
    if version == 2:
        files, prefix, inside = ("memory.max", "memory.current"), "", folder
    else:
        files, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        inside = folder / "memory"
    inside.mkdir(exist_ok=True)
    (inside / files[0]).write_text(f"{limit}\n")
    (inside / files[1]).write_text(f"{used + cached}\n")
    rows = f"anon 5\n{prefix}inactive_file {half}\n{prefix}active_file {half}\n"
    (inside / "memory.stat").write_text(rows)
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_is_full_without_its_page_cache_and_says_how_full(
    tmp_path: Path, version: int
) -> None:
    assert container_memory(tmp_path) is None
    cgroup(tmp_path, version, LIMIT, 600 * MIB, 400 * MIB)
    assert container_memory(tmp_path) == Memory(LIMIT, 600 * MIB)
    check_worker_memory("시", tmp_path)
    cgroup(tmp_path, version, LIMIT, 1000 * MIB, 0)
    full = r"model 시 .* of the container's 1024 MiB 24 are free"
    with pytest.raises(InsufficientStorage, match=full):
        check_worker_memory("시", tmp_path)
    if version == 2:
        cgroup(tmp_path, version, "max", 1000 * MIB, 0)
        check_worker_memory("시", tmp_path)
