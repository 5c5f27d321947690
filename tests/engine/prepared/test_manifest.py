"""An artifact is read once, and what was found in it is checked before anything is mapped."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from common.errors import ArtifactError
from engine.artifacts.artifact import EMBEDDING
from engine.artifacts.open import open_artifact
from engine.artifacts.read_params import read_params
from engine.native.prepared import prepared
from engine.prepared import folder as cache_folder
from engine.prepared import manifest
from engine.prepared.manifest import Manifests, from_manifest, to_manifest
from tests.engine.hugging_face import make_hugging_face
from tests.engine.models import make_artifact, write_params


class Counted:
    """Reads in this process, and counts."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self, target: Any, *arguments: Any, **limits: Any) -> Any:
        self.reads += 1
        return json.loads(json.dumps(target(*arguments)))  # as a sandbox's answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "모델", max_length=32)


@pytest.fixture
def run() -> Counted:
    return Counted()


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        Manifests().open(folder, Counted())
    return caught.value.message


@pytest.mark.parametrize("make", [make_artifact, make_hugging_face])
def test_what_is_kept_is_the_artifact(
    tmp_path: Path, make: Callable[[Path], Path], run: Counted
) -> None:
    folder = make(tmp_path / "m")
    template = {"template": "<usr>{q}<sys>", "defaults": {"q": "가"}, "stop_tokens": ["</s>"]}
    (folder / "generation.json").write_text(json.dumps(template), encoding="utf-8")
    found, plain = Manifests().open(folder, run), open_artifact(folder)
    assert (found.config, found.index, found.generation) == (
        plain.config,
        plain.index,
        plain.generation,
    )
    assert (found.tokenizer_file, found.weight_files) == (plain.tokenizer_file, plain.weight_files)
    for name, weight in plain.weights.items():
        np.testing.assert_array_equal(found.weights[name], weight)


def test_it_is_read_once_also_by_the_next_process(folder: Path, run: Counted) -> None:
    known = Manifests()
    first = known.open(folder, run)
    assert known.open(folder, run) == first
    assert Manifests().open(folder, run) == first
    assert run.reads == 1


def test_where_nothing_can_be_kept_it_is_read_once_by_each_process(
    folder: Path, tmp_path: Path, run: Counted
) -> None:
    (tmp_path / "file").touch()
    known = Manifests(tmp_path / "file" / "cache")
    known.open(folder, run)
    known.open(folder, run)
    assert run.reads == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 1}', b"artifact"])
def test_what_was_kept_and_is_damaged_is_read_again(
    folder: Path, run: Counted, damage: bytes
) -> None:
    first = Manifests().open(folder, run)
    [kept] = (folder / cache_folder.NAME).glob("*.source.json")
    said = json.loads(kept.read_bytes())
    said["artifact"] = {"config": {}}
    kept.write_bytes(json.dumps(said).encode() if damage == b"artifact" else damage)
    assert Manifests().open(folder, run) == first
    assert run.reads == 2
    assert Manifests().open(folder, run) == first
    assert run.reads == 2


@pytest.mark.parametrize(
    "name", ["config.json", "kogpt2.params", "generation.json", "kogpt2.spiece"]
)
def test_a_file_that_is_touched_added_or_replaced_is_read_again(
    folder: Path, run: Counted, name: str
) -> None:
    known = Manifests()
    known.open(folder, run)
    if (folder / name).exists():
        shutil.copyfile(folder / name, folder / "new")
        (folder / "new").replace(folder / name)
    else:
        (folder / name).write_text("{}")
    known.open(folder, run)
    assert run.reads == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_that_are_no_numbers_are_refused(folder: Path, bad: float, dtype: str) -> None:
    weights = {n: np.array(w) for n, w in read_params(folder / "kogpt2.params").items()}
    weights["_ffn_layers.1._hidden_map.bias"][-1] = bad
    weights = {name: w.astype(dtype) for name, w in weights.items()}
    write_params(folder / "kogpt2.params", weights)
    assert refused(folder) == (
        "kogpt2.params: _ffn_layers.1._hidden_map.bias holds NaN or infinity"
    )


def test_so_are_those_of_bfloat16(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m", dtype="bfloat16")
    tensor = open_artifact(folder).index["_self_attention_layers.1._out_proj.weight"]
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.offset + tensor.nbytes - 2)
        file.write(np.array(np.inf, dtype=ml_dtypes.bfloat16).tobytes())
    assert refused(folder) == (
        "model.safetensors: _self_attention_layers.1._out_proj.weight holds NaN or infinity"
    )


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation.json", "kogpt2.params", "kogpt2.spiece"],
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(
    folder: Path, name: str, kind: str
) -> None:
    _replace(folder / name, kind)
    assert refused(folder) == f"{name} is no plain file, but must be"


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"],
)
def test_nor_is_it_in_directories_of_transformers(tmp_path: Path, name: str) -> None:
    folder = make_hugging_face(tmp_path / "m")
    _replace(folder / name, "pipe")
    assert name in refused(folder)


def _replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(before)


def test_a_folder_of_too_many_files_is_refused(folder: Path) -> None:
    for i in range(manifest.MAX_FILES):
        (folder / f"파일-{i}").touch()
    assert "more than 1000 files" in refused(folder)


def _set(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *path, value = keys

    def change(said: dict[str, Any]) -> None:
        for key in path[:-1]:
            said = said[key]
        said[path[-1]] = value

    return change


TABLE = ("index", EMBEDDING)


@pytest.mark.parametrize(
    "change",
    [
        _set("config", "num_heads", 0),
        _set("config", "num_heads", 3),
        _set("config", "units", 1 << 40),
        _set("config", "units", "64"),
        _set("config", "extra", 1),
        _set("config", 5),
        _set("index", {}),
        _set("index", []),
        _set(*TABLE, 0, "../kogpt2.params"),
        _set(*TABLE, 0, "/etc/passwd"),
        _set(*TABLE, 0, "missing"),
        _set(*TABLE, 1, -4),
        _set(*TABLE, 1, 1 << 62),
        _set(*TABLE, 1, 1.5),
        _set(*TABLE, 2, "object"),
        _set(*TABLE, 3, [1 << 40, 64]),
        _set(*TABLE, 3, [1] * 200),
        _set(*TABLE, 4, [1 << 62, 4]),
        _set(*TABLE, 4, [4]),
        _set(*TABLE, None),
        _set("tokenizer", "a/../../b"),
        _set("tokenizer", 1),
        _set("generation", "template", "x"),
        _set("generation", {}),
        lambda said: said.pop("content"),
    ],
)
def test_what_a_reader_says_is_not_believed(
    folder: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    said = json.loads(json.dumps(to_manifest(open_artifact(folder))))
    from_manifest(folder, copy.deepcopy(said))
    change(said)
    with pytest.raises(ArtifactError):
        from_manifest(folder, said)


def test_prepared_models_that_came_with_an_artifact_are_not_opened(
    folder: Path, tmp_path: Path, run: Counted
) -> None:
    prepared(Manifests().open(folder, run), "int8", None, run).close()
    ours = folder / cache_folder.NAME
    shutil.move(ours, tmp_path / "theirs")
    ours.symlink_to(tmp_path / "theirs")
    for entry in (tmp_path / "theirs").iterdir():
        entry.write_bytes(b"hostile")
    prepared(Manifests().open(folder, run), "int8", None, run).close()
    assert {entry.read_bytes() for entry in ours.iterdir()} == {b"hostile"}
    assert run.reads == 4  # the artifact and a build, twice
    ours.unlink()
    shutil.move(tmp_path / "theirs", ours)
    ours.chmod(0o777)
    prepared(Manifests().open(folder, run), "int8", None, run).close()
    assert {entry.read_bytes() for entry in ours.iterdir()} == {b"hostile"}
