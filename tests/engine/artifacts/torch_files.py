"""What `torch.save` writes, made without torch, of tensors that torch would not make, too."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import encode_long


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


def tensor(saved: Saved) -> bytes:
    storage = text("storage") + f"ctorch\n{saved.kind}\n".encode() + text(saved.key) + text("cpu")
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + storage
        + number(saved.count)
        + b"tQ"
        + number(saved.offset)
        + numbers(saved.shape)
        + numbers(saved.strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def state_dict(tensors: Mapping[str, Saved]) -> bytes:
    """All names and tensors in one SETITEMS."""
    items = b"".join(text(name) + tensor(saved) for name, saved in tensors.items())
    return b"\x80\x02}(" + items + b"u."


def write(path: Path, pickled: bytes, data: bytes = bytes(64)) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", data)
    return path
