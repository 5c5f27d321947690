"""int8 matrices are packed byte for byte as onnxruntime packs them, or by onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common import onnx_session
from engine.artifacts.open import open_artifact
from engine.backends.onnx import cpu
from engine.prepared import build, folder
from tests.engine.models import make_artifact

SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"vocab": 20_003},  # rows beyond a group of four, in a file of its own
    {"units": 60, "heads": 6, "layers": 1},  # heads of 10, a width that no block divides
    {"units": 16, "heads": 2, "layers": 1},  # scales that are written into the graph
    {"units": 192, "heads": 4, "layers": 1},  # turns of two blocks, and one block left over
)


def pieces(artifact: Path, cache: Path) -> tuple[list[Any], bool]:
    """Of the entry that is built: files by content, offsets, lengths; and whether it is known how
    onnxruntime packs."""
    cpu.load(open_artifact(artifact), "int8", cache_dir=cache).close()
    [frame] = cache.glob("*.frame.json")
    [entry] = (path for path in cache.glob("*.json") if path != frame)
    found: list[Any] = json.loads(entry.read_text(encoding="utf-8"))["pieces"]
    return found, json.loads(frame.read_text(encoding="utf-8"))["as_known"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_packed_here_is_what_onnxruntime_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    artifact = make_artifact(tmp_path / "모델", **sizes)
    ours, known = pieces(artifact, tmp_path / "ours")
    monkeypatch.setattr(folder, "_own", tmp_path / "own")  # no frame is known
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(build, "_packs_as_known", lambda *_: False)
    assert pieces(artifact, tmp_path / "theirs") == (ours, False)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if "avx512_vnni" in flags and onnx_session.VERSION >= "1.24":
        assert known, "it packs int8 otherwise than engine.backends.onnx.packing says"
