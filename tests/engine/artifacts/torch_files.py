"""Files as `torch.save` writes them, made without torch, also of tensors that torch cannot make."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import encode_long

import numpy as np
from numpy.typing import NDArray

from engine.artifacts.read_torch import OLD_MAGIC


@dataclass(frozen=True)
class Saved:
    """A tensor over the first storage of the file."""

    shape: Sequence[int]
    strides: Sequence[int]
    offset: int = 0
    count: int = 1  # of the storage
    key: str = "0"
    kind: str = "FloatStorage"


def text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def number(value: int) -> bytes:
    encoded = encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(saved: Saved, old: bool = False) -> bytes:
    storage = text("storage") + f"ctorch\n{saved.kind}\n".encode() + text(saved.key) + text("cpu")
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + storage
        + number(saved.count)
        + b"N" * old  # no view
        + b"tQ"
        + number(saved.offset)
        + numbers(saved.shape)
        + numbers(saved.strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def state_dict(tensors: Mapping[str, Saved], old: bool = False) -> bytes:
    """All names and tensors in one SETITEMS."""
    items = b"".join(text(name) + tensor(saved, old) for name, saved in tensors.items())
    return b"\x80\x02}(" + items + b"u."


def write_old(path: Path, state: Mapping[str, NDArray[np.float32]]) -> Path:
    """Write as torch before 1.6: each tensor has a storage of its own, C-contiguous."""
    saved = {
        name: Saved(array.shape, [step // 4 for step in array.strides], count=array.size, key=name)
        for name, array in state.items()
    }
    machine = (
        b"\x80\x02}(" + text("little_endian") + b"\x88" + text("protocol_version") + b"M\xe9\x03u."
    )
    keys = b"\x80\x02](" + b"".join(map(text, state)) + b"e."
    with path.open("wb") as file:
        file.write(OLD_MAGIC + b"\x80\x02M\xe9\x03." + machine)
        file.write(state_dict(saved, old=True) + keys)
        for array in state.values():
            file.write(array.size.to_bytes(8, "little") + array.tobytes())
    return path


def write(path: Path, pickled: bytes, data: bytes = bytes(64), **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": pickled, "data/0": data, **files}.items():
            archive.writestr(f"archive/{name}", content)
    return path
