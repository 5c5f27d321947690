"""What all models of a shape need is done before the first of them is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import onnx_session
from engine.artifacts.open import open_artifact
from engine.backends.onnx import cpu, frames
from engine.backends.onnx.warm_up import warm_up
from engine.prepared.entries import read_entry
from engine.prepared.files import is_whole
from engine.prepared.folder import NAME, own_folder
from engine.prepared.manifest import directly
from tests.engine.models import make_artifact


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "_pieces", {})
    frames._spare.clear()
    yield
    frames._spare.clear()


@pytest.mark.skipif(
    onnx_session.VERSION < "1.24", reason="onnxruntime keeps what it packs to itself"
)
@pytest.mark.parametrize("shared", [True, False])
def test_the_first_model_of_a_shape_is_shown_in_a_session_that_is_open(
    tmp_path: Path, shared: bool
) -> None:
    artifact = make_artifact(tmp_path / "모델", units=192, heads=4, activation="gelu_new")
    opened, cache = open_artifact(artifact), tmp_path / "cache" if shared else None
    own = own_folder()
    assert own is not None
    warm_up(opened.config, "int8", cache, directly)
    [[frame]] = frames._spare.values()
    blank = {name for name in read_entry(own / frame.key)["files"] if name.endswith(".bin")}
    model = cpu.load(opened, "int8", cache_dir=cache)
    assert model._session is frame.session
    of_noise = model.piece
    copied = [path for path in (cache or artifact / NAME).glob("*.bin") if path.name in blank]
    assert [(path.name, is_whole(path)) for path in copied] == [(*blank, True)]
    assert 512 * copied[0].stat().st_blocks < copied[0].stat().st_size / 2  # holes are still holes
    model.close()

    cpu._pieces.clear()
    frames._spare.clear()
    model = cpu.load(opened, "int8", cache_dir=cache)
    assert model.piece == of_noise
    model.close()


def test_a_load_waits_for_what_is_opened_ahead_for_its_shape_and_for_nothing_else(
    tmp_path: Path,
) -> None:
    opened = open_artifact(make_artifact(tmp_path / "모델"))
    other = open_artifact(make_artifact(tmp_path / "다른 모양", activation="gelu_new"))
    loaded = threading.Event()

    def load() -> None:
        cpu.load(opened, "int8", cache_dir=tmp_path / "cache").close()
        loaded.set()

    with frames.opened_ahead((opened.config, "int8")):
        waiting = threading.Thread(target=load)
        waiting.start()
        cpu.load(other, "int8", cache_dir=tmp_path / "cache").close()
        assert not loaded.wait(0.2)
    assert loaded.wait(60)
    waiting.join()
