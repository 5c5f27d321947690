from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.errors import ArtifactChanged, ModelNotInStore, NotAModel
from serving.store.folder import CHUNK_BYTES, FolderStore
from tests.serving.store.archives import touch


def test_a_range_of_a_file_is_read_and_only_of_the_version_that_was_found(tmp_path: Path) -> None:
    path, store = tmp_path / "aliases.json", FolderStore(tmp_path)
    path.write_text("0123456789")
    os.truncate(path, 1 << 40)  # more than fits into memory
    file = store.file(path.name)
    assert file is not None
    assert b"".join(store.read(file, 5, 12)) == b"56789\0\0"
    path.write_text("another")
    with pytest.raises(ArtifactChanged):
        list(store.read(file, 0, 5))
    path.unlink()
    with pytest.raises(ModelNotInStore):
        list(store.read(file, 0, 5))


def test_a_file_that_is_rewritten_while_it_is_read_has_changed(tmp_path: Path) -> None:
    path, store = tmp_path / "aliases.json", FolderStore(tmp_path)
    path.write_bytes(b"a" * 2 * CHUNK_BYTES)
    file = store.file(path.name)
    assert file is not None
    pieces = store.read(file, 0, file.size_bytes)
    assert next(pieces) == b"a" * CHUNK_BYTES
    os.utime(path, ns=(0, 0))
    with pytest.raises(ArtifactChanged):
        next(pieces)


def test_links_do_not_lead_out_of_a_store(tmp_path: Path) -> None:
    outside, store = tmp_path / "outside", tmp_path / "store"
    store.mkdir()
    touch(outside, "a.params", "b.tar.gz", "c.safetensors")
    os.symlink(outside, store / "folder")
    os.symlink(outside / "b.tar.gz", store / "archive.tar.gz")
    assert FolderStore(store).models() == []
    for name in ("folder", "archive"):
        with pytest.raises(NotAModel, match="link out of the store"):
            FolderStore(store).find(name)
    with pytest.raises(ModelNotInStore):
        FolderStore(store).find("folder/b")
    (store / "시").mkdir()
    os.symlink(outside / "c.safetensors", store / "시" / "model.safetensors")
    with pytest.raises(NotAModel, match=r"1 of its files are links, .* cp -rL"):
        FolderStore(store).find("시")


def test_a_deep_tree_in_a_store_hides_nothing(tmp_path: Path, deep: Callable[[Path], None]) -> None:
    deep(tmp_path / "깊이")
    touch(tmp_path, "시/a.params")
    store = FolderStore(tmp_path)
    assert [model.name for model in store.models()] == ["시"]
    with pytest.raises(ModelNotInStore):
        store.find("깊이")
