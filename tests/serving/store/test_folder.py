from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.errors import ArtifactChanged, ModelNotInStore, NotAModel
from serving.store.folder import CHUNK_BYTES, FolderStore
from serving.store.sources import open_store
from tests.serving.store.archives import touch
from tests.serving.store.s3 import S3Server


def test_a_folder_offers_archives_and_unpacked_models_nested_ones_too(tmp_path: Path) -> None:
    touch(tmp_path, "소월/a.params", "팀/시/code/inference.py", "팀/동주.tar.gz")
    touch(tmp_path, "a/model.onnx", "팀/b/1/model.onnx", "팀/b/2/model.onnx")
    touch(tmp_path, "d/model/model-symbol.json", "d/model/model-0000.params")
    touch(tmp_path, "corpus/text.txt", ".hidden/a.params", "README.md", "e/notes/model.onnx.txt")
    store = FolderStore(tmp_path)
    folders = dict.fromkeys(("a", "d", "소월", "팀/b", "팀/시"), "folder")
    assert {m.name: m.kind for m in store.models()} == {**folders, "팀/동주": "archive"}
    for model in store.models():
        assert store.find(model.name) == model
    assert store.find("팀/동주.tar.gz") == store.find("팀/동주")
    for missing in ("corpus", "팀", "없음", "e"):
        with pytest.raises((ModelNotInStore, NotAModel), match=missing) as raised:
            store.find(missing)
        assert str(tmp_path) not in raised.value.message


def test_a_name_is_found_however_its_syllables_are_spelled_and_the_one_of_several_that_is_listed(
    tmp_path: Path,
) -> None:
    store = FolderStore(tmp_path)
    nfd = unicodedata.normalize("NFD", "소월.tar.gz")
    for name in (nfd, "소월.tar.gz", "소월.mar"):
        (tmp_path / name).write_text(name)
        touch(tmp_path, "소월/a.params", "b.tar.gz.tar.gz")  # the latter could not be asked for
        (listed,) = store.models()
        assert listed == store.find("소월") == store.find(unicodedata.normalize("NFD", "소월.mar"))
        if name == nfd:
            assert (listed.name, listed.kind) == ("소월", "archive")
    assert listed.url == str(tmp_path / "소월.tar.gz")


def test_a_folder_with_the_handler_that_a_load_names_is_a_model(tmp_path: Path) -> None:
    touch(tmp_path, "counter/service.py", "팀/셈/code/service.py")
    store = FolderStore(tmp_path)
    assert store.models() == []
    for name in ("counter", "팀/셈"):
        assert store.find(name, "service:handle").kind == "folder"
        for handler in (None, "other:handle"):
            with pytest.raises(NotAModel):
                store.find(name, handler)
    # Now it is a model: that the handler is not there is for its load to tell.
    touch(tmp_path, "counter/inference.py")
    assert store.find("counter", "other:handle").kind == "folder"


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


FOREIGN = [
    ("시/model-q4.gguf", "llama.cpp"),
    ("시.gguf", "llama.cpp"),
    ("시/adapter_model.bin", "weights of an adapter, but no adapter_config.json"),
    ("시/last.ckpt", "checkpoint of a training; a folder with config.json, model.safetensors"),
    ("시/model.pt", "neither what its weights are of"),
    ("시.pt", "neither what its weights are of"),
    ("시/mlp.onnx", "called model.onnx"),
    ("시.onnx", "called model.onnx"),
    ("시/checkpoint-90/model.safetensors 시/checkpoint-500/model.safetensors", "(checkpoint-500)"),
    ("시/refs/main 시/snapshots/4d7a/config.json", "hf download REPOSITORY --local-dir"),
    ("시/봄/model.safetensors 시/여름/model.safetensors", "its models are in it: 봄, 여름"),
    ("시.zip", "archives are NAME.tar.gz or NAME.mar"),
    ("시/README.md", "it holds README.md"),
]


@pytest.fixture(scope="module")
def foreign(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """A folder and a bucket with all of them, each under a number of its own."""
    folder = tmp_path_factory.mktemp("foreign")
    server.empty()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        for number, (files, _) in enumerate(FOREIGN):
            for file in files.split():
                touch(folder, f"{number}-{file}")
                server.put(f"kogpt2/{number}-{file}", b"x")
        yield [FolderStore(folder), open_store("s3://models/kogpt2/")]


@pytest.mark.parametrize("number", range(len(FOREIGN)), ids=[reason for _, reason in FOREIGN])
def test_what_is_there_and_is_no_model_is_told_with_the_reason(
    foreign: list[Any], number: int
) -> None:
    for store in foreign:
        with pytest.raises(NotAModel) as raised:
            store.find(f"{number}-시")
        assert raised.value.status == 400
        assert FOREIGN[number][1] in raised.value.message
        assert raised.value.message.startswith(f"{number}-시 in the store is no model: ")


def test_a_folders_version_changes_with_its_files_but_not_with_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.params").write_text("x")
    first = FolderStore(tmp_path).find("m").version
    (tmp_path / "m" / ".prepared").mkdir()
    (tmp_path / "m" / ".prepared" / "x").touch()
    assert FolderStore(tmp_path).find("m").version == first
    (tmp_path / "m" / "a.params").write_text("xy")
    assert FolderStore(tmp_path).find("m").version != first


def test_a_deep_tree_in_a_store_hides_nothing(tmp_path: Path, deep: Callable[[Path], None]) -> None:
    deep(tmp_path / "깊이")
    touch(tmp_path, "시/a.params")
    store = FolderStore(tmp_path)
    assert [model.name for model in store.models()] == ["시"]
    with pytest.raises(ModelNotInStore):
        store.find("깊이")
