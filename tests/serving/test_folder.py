from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from serving.errors import StartError
from serving.store.folder import provide


def archive(path: Path, text: str) -> None:
    source = path.parent / "model.params"
    source.write_text(text)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(source, "model.params")
    source.unlink()


def test_archives_and_folders_become_folders_under_their_names(tmp_path: Path) -> None:
    store, models = tmp_path / "store", tmp_path / "models"
    (store / "윤동주").mkdir(parents=True)
    (store / "윤동주" / "a.params").write_text("x")
    (store / "corpus").mkdir()
    archive(store / "소월.tar.gz", "y")
    assert provide(store, models) == ["소월", "윤동주"]
    assert (models / "소월" / "model.params").read_text() == "y"
    assert (models / "윤동주" / "a.params").read_text() == "x"
    assert not (models / "corpus").exists()


def test_an_archive_is_unpacked_again_only_when_it_changed(tmp_path: Path) -> None:
    store, models = tmp_path / "store", tmp_path / "models"
    store.mkdir()
    archive(store / "a.tar.gz", "old")
    provide(store, models)
    (models / "a" / "mark").touch()
    provide(store, models)
    assert (models / "a" / "mark").exists()
    archive(store / "a.tar.gz", "newer")
    provide(store, models)
    assert not (models / "a" / "mark").exists()
    assert (models / "a" / "model.params").read_text() == "newer"


def test_a_damaged_archive_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "bad.tar.gz").write_bytes(b"no archive")
    assert provide(tmp_path, tmp_path / "models") == []


def test_a_store_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="MODEL_STORE"):
        provide(tmp_path / "없음", tmp_path / "models")
