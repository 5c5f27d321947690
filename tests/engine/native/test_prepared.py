"""Prepared files: made once, mapped where they lie, and never used when they are not whole."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.native import prepared as module
from engine.native.model import NativeModel
from engine.native.prepared import (
    Prepared,
    Stored,
    num_bytes,
    open_prepared,
    prepared,
    write,
)
from engine.prepared import folder as folders
from engine.prepared.folder import prune
from engine.prepared.manifest import Manifests
from tests.engine.artifacts.reading import Counted
from tests.engine.backends.running import logits_of
from tests.engine.models import make_artifact

PRECISIONS = ("int8", "fp32")


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return Manifests().open(make_artifact(tmp_path / "모델", max_length=64))


def file_of(artifact: Artifact) -> Path:
    [file] = (artifact.path / ".prepared").glob("*.safetensors")
    return file


def logits(found: Prepared) -> Any:
    with closing(NativeModel(found)) as model:
        return logits_of(model, [5, 6, 7])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_is_prepared_once_and_then_mapped(artifact: Artifact, precision: str) -> None:
    """Its file is as safetensors writes it, and readable by others."""
    builds = Counted()
    first = logits(prepared(artifact, precision, None, builds))
    again = logits(prepared(artifact, precision, None, builds))
    np.testing.assert_array_equal(first, again)
    assert builds.calls["build"] == 1
    file = file_of(artifact)
    assert 0 < file.stat().st_size - num_bytes(artifact.config, precision) <= 32768  # the header
    assert file.stat().st_mode & 0o777 == 0o644
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert (ends[0][0], ends[-1][1]) == (0, len(data) - 8 - length)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))  # no holes


@pytest.mark.parametrize("damage", ["cut", "shape", "type", "source", "nothing"])
def test_a_file_that_is_not_whole_is_made_again(artifact: Artifact, damage: str) -> None:
    builds = Counted()
    right = logits(prepared(artifact, "int8", None, builds))
    file = file_of(artifact)
    data = file.read_bytes()
    f32, content = b'"positions": {"dtype": "F32"', artifact.content.encode()
    old, new = {
        "cut": (data[len(data) // 2 :], b""),
        "nothing": (data, b""),
        "shape": (f32 + b', "shape": [64', f32 + b', "shape": [63'),
        "type": (f32, f32.replace(b"F32", b"F16")),
        "source": (content, b"0" * len(content)),
    }[damage]
    assert old in data
    file.write_bytes(data.replace(old, new))
    np.testing.assert_array_equal(logits(prepared(artifact, "int8", None, builds)), right)
    assert builds.calls["build"] == 2


def test_a_file_from_before_the_machines_start_is_compared_once(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Counted()
    right = logits(prepared(artifact, "int8", None, builds))
    file = file_of(artifact)
    digests: list[int] = []
    digest = module.digest
    monkeypatch.setattr(module, "digest", lambda data: digests.append(1) or digest(data))
    os.utime(file, (1, 1))
    for _ in range(2):
        prepared(artifact, "int8", None, builds).close()
    assert (len(digests), builds.calls["build"]) == (1, 1)
    data = bytearray(file.read_bytes())
    data[-5000:-4000] = bytes(1000)  # was not on the disk yet
    file.write_bytes(data)
    os.utime(file, (1, 1))
    np.testing.assert_array_equal(logits(prepared(artifact, "int8", None, builds)), right)
    assert builds.calls["build"] == 2


def test_a_disk_without_space_is_no_end_of_the_process(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = artifact.path / ".prepared"
    real = os.posix_fallocate

    def fallocate(file: int, offset: int, length: int) -> None:
        if str(full) in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        real(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    assert np.isfinite(logits(prepared(artifact, "int8", None, Counted()))).all()
    assert "cannot keep a prepared model" in caplog.text
    assert [file.suffixes for file in full.iterdir()] == [[".source", ".json"]]


def test_an_error_of_what_fills_a_file_is_passed_on(tmp_path: Path) -> None:
    def fill(data: np.ndarray) -> None:
        raise ArtifactError(f"한국어 모델: {len(data)} bytes")

    def build(file: Path) -> int:
        with file.open("r+b") as opened:
            return write(opened.fileno(), entries, {}, fill)

    entries = [Stored("positions", (2, 3), "F32")]

    with pytest.raises(ArtifactError, match="한국어 모델: 24 bytes"):
        open_prepared(tmp_path, [], lambda _: entries, entries, "", tmp_path, build)
    assert not list(tmp_path.iterdir())


def test_the_least_recently_loaded_models_are_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    artifacts = [
        Manifests(cache).open(make_artifact(tmp_path / f"m{i}", max_length=64, seed=i))
        for i in range(3)
    ]
    for i, one in enumerate(artifacts):
        prepared(one, "int8", cache, Counted()).close()
        newest = max(cache.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (1e9 + i, 1e9 + i))
    files = sorted(cache.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    size = 512 * files[0].stat().st_blocks
    shutil.rmtree(artifacts[0].path)
    prune(cache, 2 * size)
    assert sorted(cache.glob("*.safetensors")) == sorted(files[1:])
    assert len(list(cache.glob("*" + folders.SOURCE))) == 2
    prune(cache, 0)
    assert list(cache.glob("*.safetensors")) == files[2:]  # the newest stays


def test_each_manifest_is_parsed_once_for_all_preparations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Path] = []
    read = folders.read_object
    monkeypatch.setattr(folders, "read_object", lambda path: (parsed.append(path), read(path))[1])
    cache = tmp_path / "cache"
    for i in range(3):
        Manifests(cache).open(make_artifact(tmp_path / f"m{i}", max_length=64, seed=i))
        prune(cache, 1 << 30)
    assert len(parsed) == len(set(parsed)) == 3


def test_a_new_field_of_the_configuration_renames_no_prepared_file(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(artifact, "int8", None).close()
    file = file_of(artifact)

    @dataclasses.dataclass(frozen=True)
    class Later(GPT2Config):
        rotary: bool = False

    config = Later(**dataclasses.asdict(artifact.config))
    prepared(dataclasses.replace(artifact, config=config), "int8", None, Counted()).close()
    assert file_of(artifact) == file
