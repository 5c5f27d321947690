"""What every store does, whatever holds its files: a folder of this machine, or a bucket of S3."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from serving.errors import ModelNotInStore, NotAModel, UrlNotAllowed
from serving.store import Store, open_store
from tests.serving.store.s3 import LOCATION, S3Server


@dataclass
class Place:
    """A store, and how a file gets into it."""

    store: Store
    write: Callable[[str, bytes], None]

    def put(self, *paths: str) -> None:
        for path in paths:
            self.write(path, b"x")


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        s3: S3Server = request.getfixturevalue("s3")
        return Place(open_store(LOCATION), lambda path, data: s3.put(f"kogpt2/{path}", data))
    root = tmp_path / "kogpt2"
    root.mkdir()

    def write(path: str, data: bytes) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)

    return Place(open_store(str(root)), write)


def test_archives_and_unpacked_models_are_offered_nested_ones_too(place: Place) -> None:
    place.put("소월/a.params", "팀/시/code/inference.py", "팀/동주.tar.gz", "팀/봄.mar")
    place.put("a/model.onnx", "팀/b/1/model.onnx", "팀/b/2/model.onnx")
    place.put("d/model/model-symbol.json", "d/model/model-0000.params")
    place.put("corpus/text.txt", ".hidden/a.params", "README.md", "e/notes/model.onnx.txt")
    folders = dict.fromkeys(("a", "d", "소월", "팀/b", "팀/시"), "folder")
    archives = dict.fromkeys(("팀/동주", "팀/봄"), "archive")
    offered = {model.name: model for model in place.store.models()}
    assert {name: model.kind for name, model in offered.items()} == folders | archives
    for name, model in offered.items():
        assert place.store.find(name) == model
    archive = offered["팀/동주"]
    assert place.store.find("팀/동주.tar.gz") == archive
    assert (archive.url, archive.size_bytes) == (
        f"{place.store.location.rstrip('/')}/팀/동주.tar.gz",
        1,
    )
    for missing in ("corpus", "팀", "없음", "e", "../kogpt2-other/a"):
        with pytest.raises((ModelNotInStore, NotAModel, UrlNotAllowed), match=missing) as raised:
            place.store.find(missing)
        assert "kogpt2" not in raised.value.message.replace(missing, "")


def test_a_name_is_found_however_its_syllables_are_spelled_and_the_one_of_several_that_is_listed(
    place: Place,
) -> None:
    nfd = unicodedata.normalize("NFD", "소월.tar.gz")
    place.put("소월/a.params", "b.tar.gz.tar.gz")  # the latter could not be asked for
    for name in (nfd, "소월.tar.gz", "소월.mar"):
        place.write(name, name.encode())
        (listed,) = place.store.models()
        for spelled in ("소월", unicodedata.normalize("NFD", "소월.mar")):
            assert place.store.find(spelled) == listed
        if name == nfd:
            assert (listed.name, listed.kind) == ("소월", "archive")
    assert listed.url.endswith("kogpt2/소월.tar.gz")


def test_a_folder_with_the_handler_that_a_load_names_is_a_model(place: Place) -> None:
    place.put("counter/service.py", "팀/셈/code/service.py")
    assert place.store.models() == []
    for name in ("counter", "팀/셈"):
        assert place.store.find(name, "service:handle").kind == "folder"
        for handler in (None, "other:handle"):
            with pytest.raises(NotAModel):
                place.store.find(name, handler)
    # Now it is a model: that the handler is not there is for its load to tell.
    place.put("counter/inference.py")
    assert place.store.find("counter", "other:handle").kind == "folder"


def test_a_folders_version_changes_with_its_files_but_not_with_hidden_ones(place: Place) -> None:
    place.put("m/a.params")
    first = place.store.find("m").version
    place.put("m/.prepared/x")
    assert place.store.find("m").version == first
    place.write("m/a.params", b"xy")
    assert place.store.find("m").version != first


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ("시/model-q4.gguf", "llama.cpp"),
        ("시.gguf", "llama.cpp"),
        ("시/adapter_model.bin", "weights of an adapter, but no adapter_config.json"),
        ("시/last.ckpt", "checkpoint of a training; a folder with config.json, model.safetensors"),
        ("시/model.pt", "neither what its weights are of"),
        ("시.pt", "neither what its weights are of"),
        ("시/mlp.onnx", "called model.onnx"),
        ("시.onnx", "called model.onnx"),
        ("시/checkpoint-90/model.safetensors 시/checkpoint-500/model.safetensors",
         "(checkpoint-500)"),
        ("시/refs/main 시/snapshots/4d7a/config.json", "hf download REPOSITORY --local-dir"),
        ("시/봄/model.safetensors 시/여름/model.safetensors", "its models are in it: 봄, 여름"),
        ("시.zip", "archives are NAME.tar.gz or NAME.mar"),
        ("시/README.md", "it holds README.md"),
    ],
)  # fmt: skip
def test_what_is_there_and_is_no_model_is_told_with_the_reason(
    place: Place, files: str, reason: str
) -> None:
    place.put(*files.split())
    with pytest.raises(NotAModel) as raised:
        place.store.find("시")
    assert raised.value.status == 400
    assert reason in raised.value.message
    assert raised.value.message.startswith("시 in the store is no model: ")
