from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.trees import remove
from serving.store.disk import size_bytes, walk, write_whole


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_text("가")
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    os.symlink(tmp_path / "kept", tmp_path / "tree" / "a" / "b" / "link")
    os.symlink(tmp_path / "kept", tmp_path / "link")
    remove(tmp_path / "tree")
    remove(tmp_path / "link")
    remove(tmp_path / "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "f").exists()


def test_a_walk_and_a_size_leave_links_alone(tmp_path: Path) -> None:
    (tmp_path / "m" / ".hidden").mkdir(parents=True)
    (tmp_path / "m" / ".hidden" / "f").write_bytes(bytes(100))
    (tmp_path / "m" / "g").write_bytes(bytes(10))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "h").write_bytes(bytes(1000))
    os.symlink(tmp_path / "other", tmp_path / "m" / "l")
    assert {entry.name for entry in walk(tmp_path / "m")} == {"f", "g", "l"}
    assert {entry.name for entry in walk(tmp_path / "m", hidden=False)} == {"g", "l"}
    assert 110 <= size_bytes(tmp_path / "m") < 1000
    assert size_bytes(tmp_path / "nothing") == 0


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "목록.json"
    write_whole(file, "봄".encode())
    write_whole(file, "여름".encode())
    assert [path.name for path in tmp_path.iterdir()] == ["목록.json"]
    file.with_suffix(".new").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(file, b"")
    assert file.read_text("utf-8") == "여름"
