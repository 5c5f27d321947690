from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.errors import (
    ArtifactChanged,
    ModelNotInStore,
    NotAModel,
    StartError,
    StoreAccessDenied,
)
from serving.store import Cache, Lookups, Sources
from serving.store.folder import CHUNK_BYTES, FolderStore
from tests.processes import in_a_fork
from tests.serving.store.archives import touch

A_USER = 54327


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user cannot read")
def test_what_the_server_cannot_read_is_named(open_folder: Path) -> None:
    """Whichever file or folder on the way to the model is closed."""
    touch(open_folder, "시/a.params", "시/code/inference.py", "겹/봄/b.params")
    touch(open_folder, "꽃.tar.gz", "새/c.params")
    (open_folder / "cache").mkdir()
    (open_folder / "cache").chmod(0o777)
    for name in ("시/code", "겹", "꽃.tar.gz", "새"):
        (open_folder / name).chmod(0o700 if (open_folder / name).is_dir() else 0o600)

    def refusals() -> list[str]:
        os.setresuid(A_USER, A_USER, A_USER)
        sources = Sources(FolderStore(open_folder), (open_folder,))
        lookups = Lookups(sources)
        cache = Cache(sources, open_folder / "cache", 1 << 30, 1 << 30)

        async def acquire(url: str) -> str:
            try:
                model = await lookups.locate(url)
                cache.acquire(model)
            except StoreAccessDenied as error:
                return error.message
            return ""

        async def every() -> list[str]:
            urls = ("시", "겹/봄", "꽃", str(open_folder / "새"), str(open_folder / "겹" / "봄"))
            return [await acquire(url) for url in urls]

        return asyncio.run(every())

    def refused_store() -> str:
        os.setresuid(A_USER, A_USER, A_USER)
        with pytest.raises(StartError) as refused:
            FolderStore(open_folder / "새")
        return refused.value.message

    assert f"user {A_USER} cannot read {open_folder}/새/." in in_a_fork(refused_store)
    named = ("시/code", "겹/봄", "꽃.tar.gz", "새", "겹/봄")
    for message, name in zip(in_a_fork(refusals), named, strict=True):
        assert message.startswith(f"user {A_USER} cannot read {open_folder}/{name}")
        assert "chmod -R a+rX" in message


def test_a_deep_tree_in_a_store_hides_nothing(tmp_path: Path, deep: Callable[[Path], None]) -> None:
    deep(tmp_path / "깊이")
    touch(tmp_path, "시/a.params")
    store = FolderStore(tmp_path)
    assert [model.name for model in store.models()] == ["시"]
    with pytest.raises(ModelNotInStore):
        store.find("깊이")
