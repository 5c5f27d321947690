"""An artifact is read once, and its manifest is checked before anything is mapped."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import operator
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from common.errors import ArtifactError
from engine.artifacts.artifact import EMBEDDING
from engine.artifacts.open import open_artifact
from engine.native.prepared import prepared
from engine.prepared import folder as cache_folder
from engine.prepared import manifest
from engine.prepared.manifest import (
    Manifests,
    adapter_from_manifest,
    from_manifest,
    to_manifest,
)
from tests.engine.adapters import make_adapter
from tests.engine.artifacts import reading
from tests.engine.artifacts.reading import Counted, assert_same_weights
from tests.engine.hugging_face import make_hugging_face
from tests.engine.models import make_artifact

V1 = ("config.json", "generation.json", "kogpt2.params", "kogpt2.spiece")
V2 = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "모델", max_length=32)


@pytest.fixture
def run() -> Counted:
    return Counted()


def refused(folder: Path) -> str:
    return reading.refused(folder, lambda folder: Manifests().open(folder, Counted()))


@pytest.mark.parametrize("make", [make_artifact, make_hugging_face])
def test_a_manifest_holds_the_artifact(
    tmp_path: Path, make: Callable[[Path], Path], run: Counted
) -> None:
    folder = make(tmp_path / "m")
    template = {"template": "<usr>{q}<sys>", "defaults": {"q": "가"}, "stop_tokens": ["</s>"]}
    (folder / "generation.json").write_text(json.dumps(template), encoding="utf-8")
    found, plain = Manifests().open(folder, run), open_artifact(folder)
    for field in ("config", "index", "generation", "tokenizer_file", "weight_files"):
        assert getattr(found, field) == getattr(plain, field)
    assert_same_weights(found, plain.weights)


def test_it_is_read_once_for_the_next_process_too(
    folder: Path, tmp_path: Path, run: Counted
) -> None:
    known = Manifests()
    first = known.open(folder, run)
    assert known.open(folder, run) == Manifests().open(folder, run) == first
    assert run.calls["read"] == 1
    # Where nothing can be stored, once by each process.
    (tmp_path / "file").touch()
    known = Manifests(tmp_path / "file" / "cache")
    for _ in range(2):
        known.open(folder, run)
    assert run.calls["read"] == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 1}', b"artifact"])
def test_with_a_damaged_manifest_it_is_read_again(
    folder: Path, run: Counted, damage: bytes
) -> None:
    first = Manifests().open(folder, run)
    [stored] = (folder / cache_folder.NAME).glob("*.source.json")
    wrong = {**json.loads(stored.read_bytes()), "artifact": {"config": {}}}
    stored.write_bytes(json.dumps(wrong).encode() if damage == b"artifact" else damage)
    for _ in range(2):
        assert Manifests().open(folder, run) == first
        assert run.calls["read"] == 2


@pytest.mark.parametrize("name", V1)
def test_an_added_or_replaced_file_is_read_again(folder: Path, run: Counted, name: str) -> None:
    known = Manifests()
    known.open(folder, run)
    if (folder / name).exists():
        shutil.copyfile(folder / name, folder / "new")
        (folder / "new").replace(folder / name)
    else:
        (folder / name).write_text("{}")
    known.open(folder, run)
    assert run.calls["read"] == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, bad: float, dtype: str) -> None:
    make = make_hugging_face if dtype == "bfloat16" else make_artifact
    folder, name = make(tmp_path / "m", dtype=dtype), "_ffn_layers.1._hidden_map.bias"
    tensor = open_artifact(folder).index[name]
    number = np.array(bad, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.offset + tensor.nbytes - number.nbytes)
        file.write(number.tobytes())
    assert refused(folder) == f"{tensor.file}: {name} holds NaN or infinity"


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o644),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize(
    ("make", "name", "kind"),
    [
        *itertools.product((make_artifact,), V1, ("pipe",)),
        *itertools.product((make_artifact,), V1[2:3], ("folder", "socket", "device")),
        *itertools.product((make_hugging_face,), V2, ("pipe",)),
    ],
)
def test_a_file_that_is_no_plain_one_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], name: str, kind: str
) -> None:
    path = make(tmp_path / "m") / name
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    message = refused(path.parent)
    assert name in message
    assert message == f"{name} is no plain file, but must be" or make is make_hugging_face


def test_a_folder_of_too_many_files_is_refused(folder: Path) -> None:
    for i in range(manifest.MAX_FILES):
        (folder / f"파일-{i}").touch()
    assert "more than 1000 files" in refused(folder)


TABLE = ("index", EMBEDDING)
# Of each change the keys of a field in the manifest, and its new value; `...` removes it.
CHANGES: list[tuple[Any, ...]] = [
    *(("config", "num_heads", value) for value in (0, 3)),
    *(("config", "units", value) for value in (1 << 40, "64")),
    ("config", "num_layers", 1 << 40),
    *(("config", "extra", 1), ("config", 5), ("index", {}), ("index", [])),
    *((*TABLE, 0, file) for file in ("../kogpt2.params", "/etc/passwd", "missing")),
    *((*TABLE, 1, offset) for offset in (-4, 1 << 62, 1.5)),
    *((*TABLE, 2, "object"), (*TABLE, 3, [1 << 40, 64]), (*TABLE, 3, [1] * 200)),
    *((*TABLE, 4, [1 << 62, 4]), (*TABLE, 4, [4]), (*TABLE, None)),
    *(("tokenizer", "a/../../b"), ("tokenizer", 1), ("generation", "template", "x")),
    *(("generation", {}), ("content", ...)),
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_manifest_of_a_reader_is_not_trusted(folder: Path, change: tuple[Any, ...]) -> None:
    value = json.loads(json.dumps(to_manifest(open_artifact(folder))))
    from_manifest(folder, copy.deepcopy(value))
    *path, last, new = change
    inner = functools.reduce(operator.getitem, path, value)
    inner[last] = new
    if new is ...:
        del inner[last]
    with pytest.raises(ArtifactError):
        from_manifest(folder, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("scales", 10**400), ("tokens", [float("inf")])],
    ids=["scales", "tokens"],
)
def test_a_number_beyond_floats_in_an_adapters_manifest_is_refused(
    folder: Path, tmp_path: Path, field: str, value: Any
) -> None:
    path = make_adapter(tmp_path / "어댑터", folder)
    read = manifest.read_adapter(str(path))
    adapter_from_manifest(path, copy.deepcopy(read))
    read[field] = dict.fromkeys(read["scales"], value)
    with pytest.raises(ArtifactError, match="changed while it was read"):
        adapter_from_manifest(path, read)


def test_a_foreign_folder_of_prepared_models_is_not_used(
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
    assert run.calls == {"read": 2, "build": 2}
    ours.unlink()
    shutil.move(tmp_path / "theirs", ours)
    ours.chmod(0o777)
    prepared(Manifests().open(folder, run), "int8", None, run).close()
    assert {entry.read_bytes() for entry in ours.iterdir()} == {b"hostile"}
