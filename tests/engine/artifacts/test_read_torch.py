"""`pytorch_model.bin` is read by its opcodes: weights come out, and nothing is ever called."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError
from engine.artifacts.read_torch import OLD_MAGIC, index_torch
from tests.engine.artifacts.reading import read_torch
from tests.engine.artifacts.torch_files import Saved, state_dict, text, write

REAL = Path(__file__).with_name("pytorch_model.bin")


def refused(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        read_torch(path)
    assert path.name in caught.value.message
    return caught.value.message


def archive(path: Path, pickled: bytes, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("archive/data.pkl", pickled)
        for name, content in files.items():
            target.writestr(f"archive/{name}", content)
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
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(
    tmp_path: Path, protocol: int
) -> None:
    made = tmp_path / "made"
    pickled = pickle.dumps({"w": Hostile(os.mkdir, str(made))}, protocol)
    message = refused(archive(tmp_path / "hostile.bin", pickled))
    assert "mkdir" in message or "which no state_dict needs" in message
    assert not made.exists()


def test_a_whole_pickled_model_is_refused_by_its_class(tmp_path: Path) -> None:
    pickled = pickle.dumps(Path("x"), 2)
    message = refused(archive(tmp_path / "model.bin", pickled))
    assert "would call" in message
    assert "state_dict" in message


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02K\x01.",
        b"\x80\x02u.",
        b"\x80\x02]q\x00.",
        b"\x80\x02h\x05.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00bu.",
        b"\x80\x02U\x01xQ.",
        pickle.dumps({1: 2}, 2),
        pickle.dumps(["a"], 2),
        b"garbage" * 10,
    ],
)
def test_a_pickle_without_sense_is_refused(tmp_path: Path, pickled: bytes) -> None:
    refused(archive(tmp_path / "odd.bin", pickled))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    path.write_bytes(pickle.dumps({"w": 1}, 2))
    assert "not what torch.save writes" in refused(path)
    path.write_bytes(OLD_MAGIC + pickle.dumps({"w": 1}, 2))
    assert "makes no sense" in refused(path)
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("readme.txt", "가")
    assert "no data.pkl" in refused(path)


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    assert "big-endian" in refused(
        archive(tmp_path / "big.bin", pickle.dumps({}, 2), byteorder=b"big")
    )


def patched(path: Path, change: Any) -> Path:
    """The real file with its members changed."""
    with zipfile.ZipFile(REAL) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            name, data = entry.filename, source.read(entry)
            change(target, name, data)
    return path


def test_numbers_that_are_missing_or_cut_or_packed_are_refused(tmp_path: Path) -> None:
    def without(target: zipfile.ZipFile, name: str, data: bytes) -> None:
        if not name.endswith("/data/0"):
            target.writestr(name, data)

    def cut(target: zipfile.ZipFile, name: str, data: bytes) -> None:
        target.writestr(name, data[:-4] if name.endswith("/data/0") else data)

    def packed(target: zipfile.ZipFile, name: str, data: bytes) -> None:
        target.writestr(name, data, zipfile.ZIP_DEFLATED)

    assert "damaged" in refused(patched(tmp_path / "without.bin", without))
    assert "cut short" in refused(patched(tmp_path / "cut.bin", cut))
    assert "packed" in refused(patched(tmp_path / "packed.bin", packed))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole, path = REAL.read_bytes(), tmp_path / "cut.bin"
    for length in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:length])
        refused(path)


def test_a_flipped_byte_never_crashes(tmp_path: Path) -> None:
    """Either it is refused, or it is in the numbers."""
    with zipfile.ZipFile(REAL) as source:
        name = next(n for n in source.namelist() if n.endswith("data.pkl"))
        pickled = source.read(name)
    path = tmp_path / "flipped.bin"
    for at in range(0, len(pickled), 7):
        changed = bytearray(pickled)
        changed[at] ^= 0x15

        def flip(target: zipfile.ZipFile, entry: str, data: bytes, new: Any = changed) -> None:
            target.writestr(entry, bytes(new) if entry == name else data)

        try:
            for weight in read_torch(patched(path, flip)).values():
                weight.sum()
        except ArtifactError:
            pass


def test_a_whole_pickled_model_says_what_to_save_instead(tmp_path: Path) -> None:
    name = b"ctransformers.models.gpt2.modeling_gpt2\nGPT2LMHeadModel\n"
    file = write(tmp_path / "pytorch_model.bin", b"\x80\x02" + name + b")\x81}b.")
    with pytest.raises(ArtifactError, match=r"whole pickled object .*model\.state_dict\(\)"):
        index_torch(file)


def test_a_checkpoint_of_a_training_says_where_its_weights_are(tmp_path: Path) -> None:
    inner = state_dict({"transformer.wte.weight": Saved([1], [1])})[2:-1]
    pickled = b"\x80\x02}(" + text("epoch") + b"K\x03" + text("model_state_dict") + inner + b"u."
    file = write(tmp_path / "pytorch_model.bin", pickled)
    with pytest.raises(ArtifactError, match=r"under 'model_state_dict' \(keys: epoch, model_st"):
        index_torch(file)
