"""The cache of prepared models: hits, damage, several builders, folders that cannot be written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import onnx_session
from common.errors import OutOfMemory
from engine.artifacts.open import open_artifact
from engine.backends.onnx import cpu
from engine.backends.onnx.cpu import OnnxModel
from engine.prepared import cache as prepared
from engine.prepared import entries as entries_of
from engine.prepared import folder as cache_folder
from engine.prepared import frame
from engine.prepared.folder import own_folder
from tests.engine.models import make_artifact

IDS = np.arange(2, 12)


def load(artifact: Path, cache: Path | None, precision: str = "int8") -> OnnxModel:
    return cpu.load(open_artifact(artifact), precision, cache_dir=cache)


def answer(artifact: Path, cache: Path | None, precision: str = "int8") -> Any:
    """Loads the model, asks it for logits, and closes it."""
    model = load(artifact, cache, precision)
    model.add_row()
    logits = model.extend(0, IDS)
    model.close()
    return logits


def files(cache: Path) -> dict[str, tuple[int, int, int]]:
    """Each file of a cache with what would change if it were written.

    An entry's time says when it was used last; what is written anew has another inode.
    """
    stats = {path.name: path.stat() for path in cache.iterdir()}
    return {
        name: (s.st_ino, s.st_size, 0 if name.endswith(".json") else s.st_mtime_ns)
        for name, s in stats.items()
    }


def entries(cache: Path) -> set[str]:
    return {name for name in files(cache) if re.fullmatch(r"[0-9a-f]+\.json", name)}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "model", vocab=20_000)  # the head has a file of its own


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_a_second_load_finds_the_first_ones_files(
    artifact: Path, cache: Path, precision: str
) -> None:
    first = answer(artifact, cache, precision)
    written = files(cache)
    second = answer(artifact, cache, precision)
    np.testing.assert_array_equal(first, second)
    assert files(cache) == written
    assert not any(name.startswith(cache_folder.BUILDING) for name in written)


def test_without_a_cache_folder_it_is_in_the_artifacts_own(artifact: Path) -> None:
    answer(artifact, None)
    assert len(entries(artifact / cache_folder.NAME)) == 1
    open_artifact(artifact)  # still a model folder


def test_the_same_weights_under_another_name_or_time_are_the_same_entry(
    artifact: Path, cache: Path, tmp_path: Path
) -> None:
    answer(artifact, cache)
    found = entries(cache)
    os.utime(open_artifact(artifact).weight_files[0])
    answer(artifact, cache)
    answer(make_artifact(tmp_path / "again", vocab=20_000, prefix="kogpt2."), cache)
    assert entries(cache) == found


def test_other_weights_settings_or_precision_are_another_entry(artifact: Path, cache: Path) -> None:
    before = answer(artifact, cache)
    answer(artifact, cache, "fp32")
    assert len(entries(cache)) == 2
    make_artifact(artifact, vocab=20_000, activation="gelu_new")
    answer(artifact, cache)
    assert len(entries(cache)) == 3
    make_artifact(artifact, vocab=20_000, seed=1)
    assert not np.array_equal(answer(artifact, cache), before)
    assert len(entries(cache)) == 4


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("suffix", [".bin", ".onnx", ".json"])
def test_a_damaged_entry_is_made_anew(
    artifact: Path, cache: Path, suffix: str, damage: Any
) -> None:
    whole = answer(artifact, cache)
    before = files(cache)
    for path in cache.glob(f"*{suffix}"):
        damage(path)
    np.testing.assert_array_equal(answer(artifact, cache), whole)
    content = {name: size for name, (_, size, _) in files(cache).items() if suffix in name}
    assert content.keys() == {name for name in before if suffix in name}
    after = files(cache)
    np.testing.assert_array_equal(answer(artifact, cache), whole)
    assert files(cache) == after


def test_an_entry_of_another_build_that_says_too_little_is_made_anew(
    artifact: Path, cache: Path
) -> None:
    expected = answer(artifact, cache)
    for entry in cache.glob("*.json"):
        whole = json.loads(entry.read_text(encoding="utf-8"))
        for key in sorted(set(whole) - {"files", "said"}):
            less = {name: value for name, value in whole.items() if name != key}
            entry.write_text(json.dumps(less | {"said": entries_of._said(less)}), encoding="utf-8")
            np.testing.assert_array_equal(answer(artifact, cache), expected, key)
            assert set(json.loads(entry.read_text(encoding="utf-8"))) == set(whole), key


def test_a_copied_cache_is_checked_once_and_used(artifact: Path, cache: Path) -> None:
    whole = answer(artifact, cache)
    copy = cache.with_name("copy")
    shutil.copytree(cache, copy, copy_function=shutil.copyfile)  # new times and inodes
    content = {name: node for name, node in files(copy).items() if ".json" not in name}
    np.testing.assert_array_equal(answer(artifact, copy), whole)
    assert content.items() <= files(copy).items()  # nothing was built
    [entry], [frame] = entries(copy), copy.glob("*.frame.json")
    stamps = {
        name: stamp
        for path in (copy / entry, frame)
        for name, stamp in json.loads(path.read_text(encoding="utf-8"))["files"].items()
    }
    assert stamps == {name: [size, mtime] for name, (_, size, mtime) in content.items()}


def test_a_cache_that_cannot_be_written_is_no_error(
    artifact: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    own_folder()  # of the process, not of this test
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (tmp_path / "file").write_text("")
    model = load(artifact, tmp_path / "file" / "cache")
    assert list(temporary.iterdir()) == []  # and nothing stays behind
    model.add_row()
    np.testing.assert_array_equal(model.extend(0, IDS), answer(artifact, cache))
    model.close()


def test_no_disk_at_all_is_out_of_memory(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(OutOfMemory, match="no disk has room"):
        load(artifact, tmp_path / "file" / "cache")


def test_two_models_with_the_same_embedding_store_it_once(cache: Path, tmp_path: Path) -> None:
    one = make_artifact(tmp_path / "one", vocab=20_000, seed=1, embedding_seed=9)
    two = make_artifact(tmp_path / "two", vocab=20_000, seed=2, embedding_seed=9)
    models = [load(one, cache)]
    before = files(cache)
    models.append(load(two, cache))
    embedding_bytes = 20_000 * 64
    after = files(cache)
    assert before.items() <= after.items()
    new = sum(size for name, (_, size, _) in after.items() if name not in before)
    assert new < embedding_bytes / 2  # neither the table nor the head
    for model in models:
        model.close()


def test_tables_of_the_same_content_are_mapped_once(artifact: Path, tmp_path: Path) -> None:
    one = load(artifact, tmp_path / "one", "fp32")
    other = load(artifact, tmp_path / "elsewhere", "fp32")
    assert other._embedding is one._embedding
    for model in (one, other):
        model.close()


def test_an_embedding_that_is_the_output_projection_is_there_once(
    artifact: Path, tmp_path: Path
) -> None:
    load(artifact, tmp_path / "here").close()
    [entry] = entries(tmp_path / "here")
    files: dict[str, list[int]] = json.loads((tmp_path / "here" / entry).read_text("utf-8"))[
        "files"
    ]
    assert sum(size >= 20_000 * 64 for size, _ in files.values()) == 1


def test_int8_is_prepared_for_every_processor_and_fp32_for_one(
    artifact: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for precision in ("int8", "fp32"):
        load(artifact, cache, precision).close()
    before = files(cache)
    monkeypatch.setattr(frame, "cpu_model", lambda: "another")
    monkeypatch.setattr(onnx_session, "VERSION", onnx_session.VERSION + ".1")
    load(artifact, cache, "int8").close()
    assert files(cache) == before
    load(artifact, cache, "fp32").close()
    assert len(entries(cache)) == 3


LOAD_AND_HASH = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.engine.prepared.test_cache import answer
sys.stdin.read(1)
print(hashlib.sha256(answer(Path(sys.argv[2]), Path(sys.argv[3])).tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_several_processes_may_build_the_same_entry_at_once(artifact: Path, cache: Path) -> None:
    root = Path(prepared.__file__).parents[2]
    command = [sys.executable, "-c", LOAD_AND_HASH, root, artifact, cache]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(answers) == 1
    assert len(entries(cache)) == 1
    assert not list(cache.glob(cache_folder.BUILDING + "*"))


def test_what_a_killed_builder_left_is_removed_after_an_hour(artifact: Path, cache: Path) -> None:
    old, fresh = cache / f"{cache_folder.BUILDING}old", cache / f"{cache_folder.BUILDING}fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"half")
    os.utime(old, (time.time() - 4000,) * 2)
    answer(artifact, cache)
    assert not old.exists()
    assert fresh.exists()
