"""Reads the weights in `pytorch_model.bin` without torch, the arrays mapped from the file.

`torch.save` writes a zip archive: `data.pkl`, a pickle of the names and shapes, and one stored file
for the numbers of each tensor. A pickle is a program that may call anything; here only the opcodes
that build names, numbers and tensors are understood, and nothing is ever imported or called:
whatever else a file asks for is refused by its name.
Formats: https://docs.python.org/3/library/pickletools.html, torch/csrc/jit/serialization.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.errors import ArtifactError

MAX_PICKLE_BYTES = 64 << 20
STORAGES: dict[str, np.dtype[Any]] = {
    "torch DoubleStorage": np.dtype("<f8"),
    "torch FloatStorage": np.dtype("<f4"),
    "torch HalfStorage": np.dtype("<f2"),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch LongStorage": np.dtype("<i8"),
    "torch IntStorage": np.dtype("<i4"),
    "torch ShortStorage": np.dtype("<i2"),
    "torch CharStorage": np.dtype("i1"),
    "torch ByteStorage": np.dtype("u1"),
    "torch BoolStorage": np.dtype("?"),
}
_MARK = object()


@dataclass(frozen=True)
class _Global:
    name: str  # "module name"


def read_torch(path: Path) -> dict[str, NDArray[Any]]:
    """Name -> array of a state_dict that `torch.save` wrote (torch 1.6 or later).

    Raises `ArtifactError` for anything else, for example a whole pickled model.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ArtifactError(
                f"{path.name} is not what torch.save writes since torch 1.6: save it again, as"
                " model.safetensors (save_pretrained) if possible"
            )
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            pickles = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1 or entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
                raise ArtifactError(f"{path.name} is not what torch.save writes: no data.pkl")
            folder = pickles[0].removesuffix("data.pkl")
            if folder + "byteorder" in entries and archive.read(folder + "byteorder") != b"little":
                raise ArtifactError(f"{path.name} was written on a big-endian machine")
            pickle = archive.read(pickles[0])
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ArtifactError(f"{path.name} is damaged: {error}") from None
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read: {error.strerror}") from None
    data = np.memmap(path, dtype=np.uint8, mode="r")
    storages = _Storages(path.name, data, folder, entries)
    try:
        found = _run(path.name, pickle, storages)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise ArtifactError(f"{path.name} is damaged: its pickle makes no sense") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ArtifactError(f"{path.name} holds no state_dict, which is a dict of named tensors")
    return {name: w for name, w in found.items() if isinstance(w, np.ndarray)}


class _Storages:
    """The numbers of each tensor, by the key that the pickle has for them."""

    def __init__(
        self, file: str, data: NDArray[np.uint8], folder: str, entries: dict[str, Any]
    ) -> None:
        self._file, self._data, self._folder, self._entries = file, data, folder, entries

    def get(self, description: Any) -> NDArray[Any]:
        """('storage', its class, key, device, count) -> (count,)."""
        _, kind, key, _, count = description
        if not isinstance(kind, _Global) or kind.name not in STORAGES:
            raise ArtifactError(f"{self._file} holds numbers of an unknown type ({kind})")
        entry = self._entries[f"{self._folder}data/{key}"]
        # The entry's own header says how long its name and its padding are.
        header = self._data[entry.header_offset : entry.header_offset + 30].tobytes()
        name_bytes, extra_bytes = struct.unpack("<26xHH", header)
        begin = entry.header_offset + 30 + name_bytes + extra_bytes
        end = begin + count * STORAGES[kind.name].itemsize
        if entry.compress_type != zipfile.ZIP_STORED or count < 0:
            raise ArtifactError(f"{self._file} is damaged: its tensors are packed")
        if end > min(len(self._data), begin + entry.file_size):
            raise ArtifactError(f"{self._file} is cut short")
        return self._data[begin:end].view(STORAGES[kind.name])


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> NDArray[Any]:
    """A view of a storage. Strides are in numbers, and may be in any order."""
    if not isinstance(storage, np.ndarray) or storage.ndim != 1 or len(shape) != len(strides):
        raise ValueError("no storage")
    if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
        raise ValueError("no natural numbers")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if all(shape) and last >= len(storage):
        raise ValueError("beyond the storage")
    size = storage.itemsize
    steps = tuple(s * size for s in strides)
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


_CALLS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": lambda: {},
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": lambda data, *rest: data,
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "INT", "LONG"}
_VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "BINUNICODE8"}
_GETS, _PUTS = {"BINGET", "LONG_BINGET", "GET"}, {"BINPUT", "LONG_BINPUT", "PUT"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _run(file: str, pickle: bytes, storages: _Storages) -> Any:
    """The value that the pickle builds."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        at = max(i for i, value in enumerate(stack) if value is _MARK)
        values = stack[at + 1 :]
        del stack[at:]
        return values

    argument: Any
    for opcode, argument, _ in pickletools.genops(pickle):
        name = opcode.name
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            stack.append(argument)
        elif name in _PUTS:
            memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _GETS:
            stack.append(memo[int(argument)])
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name == "GLOBAL":
            stack.append(_Global(argument))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [_Global(f"{stack[-2]} {stack[-1]}")]
        elif name == "BINPERSID":
            stack.append(storages.get(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, _Global) or function.name not in _CALLS:
                what = getattr(function, "name", "what is no function").replace(" ", ".")
                raise ArtifactError(
                    f"{file} would call {what}: only plain weights are read, a state_dict as"
                    " save_pretrained writes it"
                )
            stack.append(_CALLS[function.name](*arguments))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            values = pop_to_mark()
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = pop_to_mark()
            stack[-1].extend(values)
        elif name == "BUILD":
            stack.pop()  # attributes of the state_dict itself, such as _metadata
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ArtifactError(f"{file}: its pickle holds {name}, which no state_dict needs")
    raise ArtifactError(f"{file} is cut short")
