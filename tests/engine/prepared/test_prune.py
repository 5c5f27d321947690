"""A shared cache of prepared models stays within its bound."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.prepared.prune import in_use, prune
from engine.registry import Engine
from engine.settings import Settings
from tests.engine.models import make_artifact

MODEL_BYTES = 20_000 * 64  # at least: its embedding, which is its head, as int8


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "준비된"


def prepare(cache: Path, *models: Path) -> None:
    """Loads each model once, one after the other."""
    settings = Settings(backend="onnxruntime", cache_dir=str(cache), memory_mib=256)
    engine = Engine(settings)
    try:
        for i, model in enumerate(models):
            engine.load(model.name, str(model))
            engine.unload(model.name)
            newest = max(entries(cache), key=lambda path: path.stat().st_mtime_ns)
            os.utime(newest, (1_000_000 + i, 1_000_000 + i))  # in the order of the loads
    finally:
        engine.close()


def model(folder: Path, seed: int) -> Path:
    return make_artifact(folder / f"모델{seed}", vocab=20_000, units=64, seed=seed)


def entries(cache: Path) -> list[Path]:
    return [p for p in cache.glob("*.json") if re.fullmatch(r"[0-9a-f]+\.json", p.name)]


def size(cache: Path) -> int:
    return sum(512 * p.stat().st_blocks for p in cache.iterdir() if p.suffix in (".bin", ".onnx"))


def test_the_model_that_was_not_loaded_for_longest_goes_with_its_files(
    tmp_path: Path, cache: Path
) -> None:
    models = [model(tmp_path, seed) for seed in range(3)]
    prepare(cache, *models)
    assert len(entries(cache)) == 3
    oldest = min(entries(cache), key=lambda path: path.stat().st_mtime)
    everything = size(cache)

    prune(cache, everything - 1)

    assert oldest not in entries(cache)
    assert len(entries(cache)) == 2
    assert size(cache) <= everything - MODEL_BYTES
    before = {p.name: p.stat().st_mtime_ns for p in cache.glob("*.bin")}
    prepare(cache, models[1], models[2])  # those that stayed are whole
    assert {p.name: p.stat().st_mtime_ns for p in cache.glob("*.bin")} == before


def test_what_two_models_share_stays_with_the_one_that_stays(tmp_path: Path, cache: Path) -> None:
    first, second = model(tmp_path, 0), model(tmp_path, 1)
    twin = make_artifact(tmp_path / "쌍둥이", vocab=20_000, units=64, seed=0)
    prepare(cache, first, twin, second)
    assert len(entries(cache)) == 2  # equal content is one entry
    prune(cache, 1)  # the newest stays even if it alone is too large
    assert len(entries(cache)) == 1
    prepare(cache, second)
    assert len(entries(cache)) == 1


def test_what_is_being_prepared_is_left_alone(tmp_path: Path, cache: Path) -> None:
    prepare(cache, model(tmp_path, 0), model(tmp_path, 1))
    with in_use(cache):
        done = threading.Thread(target=prune, args=(cache, 1))
        done.start()
        done.join(60)
        assert not done.is_alive()  # nobody waits
        assert len(entries(cache)) == 2
    prune(cache, 1)
    assert len(entries(cache)) == 1


def test_files_that_belong_to_no_model_go(tmp_path: Path, cache: Path) -> None:
    cache.mkdir()
    (cache / "0123.bin").write_bytes(b"left by a kill")
    (cache / "4567.source.json").write_text('{"files": [["/없는/파일.params"]], "content": ""}')
    prune(cache, 1 << 30)
    assert list(cache.iterdir()) == []


def test_a_frame_goes_with_the_last_model_of_its_shape(tmp_path: Path, cache: Path) -> None:
    prepare(cache, model(tmp_path, 0), model(tmp_path, 1))
    other = make_artifact(tmp_path / "다른 모양", vocab=20_000, units=64, activation="gelu_new")
    prepare(cache, other)
    assert len(list(cache.glob("*.frame.json"))) == 2
    newest = max(entries(cache), key=lambda path: path.stat().st_ctime_ns)
    os.utime(newest, (1, 1))
    prune(cache, size(cache) - 1)
    [frame] = cache.glob("*.frame.json")
    assert {json.loads(p.read_bytes())["frame"] for p in entries(cache)} == {frame.name}
    assert all((cache / name).exists() for name in json.loads(frame.read_bytes())["files"])


def test_the_engine_keeps_its_cache_within_the_setting(tmp_path: Path, cache: Path) -> None:
    models = [model(tmp_path, seed) for seed in range(2)]
    settings = Settings(backend="onnxruntime", cache_dir=str(cache), cache_max_mib=1)
    engine = Engine(settings)
    try:
        for found in models:
            engine.load(found.name, str(found))
            assert len(entries(cache)) == 1
    finally:
        engine.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_folder_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.mkdir(mode=0o755)
    code = (
        "import os, sys; from pathlib import Path; from engine.prepared.prune import in_use, prune;"
        "os.seteuid(65534); folder = Path(sys.argv[1]); prune(folder, 1)\n"
        "with in_use(folder): pass"
    )
    cache.parent.chmod(0o755)
    subprocess.run([sys.executable, "-c", code, str(cache)], check=True, timeout=60)
    assert list(cache.iterdir()) == []
