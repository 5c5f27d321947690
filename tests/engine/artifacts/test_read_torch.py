"""`pytorch_model.bin` is read by its opcodes: weights come out, and nothing is ever called."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError
from engine.artifacts import read_torch as module
from engine.artifacts import tensor_index
from engine.artifacts.read_torch import OLD_MAGIC, index_torch
from tests.engine.artifacts import reading
from tests.engine.artifacts.reading import read_torch
from tests.engine.artifacts.torch_files import Saved, state_dict, text, write

REAL = Path(__file__).with_name("pytorch_model.bin")


def refused(path: Path) -> str:
    message = reading.refused(path, read_torch)
    assert path.name in message
    return message


def patched(path: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> Path:
    """The real file with its members changed, or left out for None."""
    with zipfile.ZipFile(REAL) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            if (data := change(entry.filename, source.read(entry))) is not None:
                target.writestr(entry.filename, data, **options)
    return path


def test_what_torch_wrote_is_read_as_views_of_the_file() -> None:
    weights = read_torch(REAL)
    assert weights["transformer.wte.weight"].shape == (440, 16)
    assert weights["transformer.h.0.mlp.c_fc.weight"].shape == (16, 64)
    assert weights["transformer.h.0.attn.bias"].dtype == np.uint8
    assert weights["transformer.h.0.attn.masked_bias"].shape == ()
    table, head = weights["transformer.wte.weight"], weights["lm_head.weight"]
    assert np.shares_memory(table, head)
    assert not table.flags.writeable


class Hostile:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_call_something_is_refused(tmp_path: Path, protocol: int) -> None:
    made = tmp_path / "made"
    pickled = pickle.dumps({"w": Hostile(os.mkdir, str(made))}, protocol)
    message = refused(write(tmp_path / "hostile.bin", pickled))
    assert "mkdir" in message or "which no state_dict needs" in message
    assert not made.exists()


def test_a_pickled_model_or_checkpoint_is_refused_with_what_to_save_instead(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "model.bin", pickle.dumps(Path("x"), 2)))
    assert "would call" in message
    assert "state_dict" in message
    name = b"ctransformers.models.gpt2.modeling_gpt2\nGPT2LMHeadModel\n"
    whole = write(tmp_path / "pytorch_model.bin", b"\x80\x02" + name + b")\x81}b.")
    with pytest.raises(ArtifactError, match=r"whole pickled object .*model\.state_dict\(\)"):
        index_torch(whole)
    inner = state_dict({"transformer.wte.weight": Saved([1], [1])})[2:-1]
    pickled = b"\x80\x02}(" + text("epoch") + b"K\x03" + text("model_state_dict") + inner + b"u."
    with pytest.raises(ArtifactError, match=r"under 'model_state_dict' \(keys: epoch, model_st"):
        index_torch(write(whole, pickled))


@pytest.mark.parametrize(
    "pickled",
    [
        *(b"", b"\x80\x02", b"\x80\x02.", b"\x80\x02K\x01.", b"\x80\x02u.", b"\x80\x02]q\x00."),
        *(b"\x80\x02h\x05.", b"\x80\x02}q\x00(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00bu."),
        *(b"\x80\x02U\x01xQ.", pickle.dumps({1: 2}, 2), pickle.dumps(["a"], 2), b"garbage" * 10),
    ],
)
def test_a_pickle_without_sense_is_refused(tmp_path: Path, pickled: bytes) -> None:
    refused(write(tmp_path / "odd.bin", pickled))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    path.write_bytes(pickle.dumps({"w": 1}, 2))
    assert "not what torch.save writes" in refused(path)
    path.write_bytes(OLD_MAGIC + pickle.dumps({"w": 1}, 2))
    assert "makes no sense" in refused(path)
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("readme.txt", "가")
    assert "no data.pkl" in refused(path)
    assert "big-endian" in refused(write(path, pickle.dumps({}, 2), byteorder=b"big"))


def test_numbers_that_are_missing_or_cut_or_packed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    first = "/data/0"
    assert "damaged" in refused(patched(path, lambda n, d: None if n.endswith(first) else d))
    assert "cut short" in refused(patched(path, lambda n, d: d[:-4] if n.endswith(first) else d))
    packed = patched(path, lambda n, d: d, compress_type=zipfile.ZIP_DEFLATED)
    assert "packed" in refused(packed)
    whole = REAL.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:length])
        refused(path)


# Damaged and hostile tensors; tests/fuzz/test_weights.py has random ones


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (Saved([1] * 200, [1] * 200), "200 dimensions"),
        (Saved([1] * 200, [0] * 200), "200 dimensions"),
        (Saved([1 << 40, 1 << 40], [0, 0]), "no possible shape"),
        (Saved([1 << 20, 16], [0, 1], count=16), "more numbers than the file"),
        (Saved([2], [1 << 62]), "no sense"),
        (Saved([1], [1], offset=1 << 62), "no sense"),
        (Saved([0], [1], offset=-1), "no sense"),
        (Saved([-1], [1]), "no sense"),
        (Saved([1 << 62, 0], [1, 1]), "no possible shape"),
        (Saved([1], [1], count=1 << 62), "cut short"),
    ],
)
def test_an_impossible_tensor_is_refused(tmp_path: Path, saved: Saved, message: str) -> None:
    path = write(tmp_path / "pytorch_model.bin", state_dict({"transformer.wte.weight": saved}))
    assert message in refused(path)


def test_a_tensor_of_numpys_most_dimensions_is_read(tmp_path: Path) -> None:
    saved = {"a": Saved([1] * 32, [0] * 32), "b": Saved([2, 3], [1, 2], offset=1, count=7)}
    data = np.arange(16, dtype=np.float32)
    found = read_torch(write(tmp_path / "m.bin", state_dict(saved), data.tobytes()))
    assert found["a"].shape == (1,) * 32
    np.testing.assert_array_equal(found["b"], [[1, 3, 5], [2, 4, 6]])


def test_many_tensors_take_linear_time_and_too_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mark was looked for from the bottom of the stack: 2,000 layers took minutes."""

    def file(count: int) -> Path:
        saved = {f"h.{i}": Saved([1], [1]) for i in range(count)}
        return write(tmp_path / f"{count}.bin", state_dict(saved))

    def lines(path: Path) -> int:
        """Count the lines of the reader that run."""
        count = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace if frame.f_code.co_filename == module.__file__ else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            index_torch(path)
        finally:
            sys.settrace(before)
        return count

    assert lines(file(80)) < 4.4 * lines(file(20))
    monkeypatch.setattr(tensor_index, "MAX_TENSORS", 99)
    assert "100 tensors, at most 99" in refused(file(100))


def test_a_tensors_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.bin", state_dict({"\ud800": Saved([1], [1])}))
    assert "the name of a tensor is no text" in refused(path)
