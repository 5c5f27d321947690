"""Reads the weights in `pytorch_model.bin` without torch, the arrays mapped from the file.

`torch.save` writes a zip archive: `data.pkl`, a pickle of the names and shapes, and a stored file
with the numbers of each tensor. A pickle is a program that may call anything; here the standard
library runs only the opcodes that build names, numbers and tensors, and imports and calls nothing:
anything else is refused by its name. Formats: https://docs.python.org/3/library/pickletools.html,
torch/csrc/jit/serialization.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from engine.artifacts import tensor_index
from engine.artifacts.files import map_file, open_file, readable
from engine.artifacts.tensor_index import DTYPES, Index, Tensor

MAX_PICKLE_BYTES = 64 << 20
# The first bytes of files by torch before 1.6: MAGIC_NUMBER of torch/serialization.py, pickled.
OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
OLD_PROTOCOL = 1001
# Errors of damaged archives (RuntimeError if a password is needed) and of damaged pickles.
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, EOFError, RuntimeError,
    ValueError,
)  # fmt: skip
_NONSENSE = (
    ValueError, LookupError, TypeError, AttributeError, EOFError, OverflowError, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip
MAX_GLOBAL = 200  # characters of a class's or function's name
STORAGES = {
    f"torch {kind}Storage": dtype
    for kind, dtype in {
        "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
        "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
        "Bool": "bool",
    }.items()
}  # fmt: skip


class _Storage(NamedTuple):
    """Numbers one after the other, `length` of them from byte `begin` of the file."""

    file: str
    begin: int
    dtype: str
    length: int


def is_torch(path: Path) -> bool:
    """Whether `torch.save` wrote the file. Raises `ArtifactError`."""
    with open_file(path) as file:
        return file.read(len(OLD_MAGIC)) == OLD_MAGIC or zipfile.is_zipfile(file)


def index_torch(path: Path) -> Index:
    """Index the tensors of a state_dict by `torch.save`. Raises `ArtifactError`."""
    try:
        with readable(path.name), open_file(path) as file:
            old = file.read(len(OLD_MAGIC)) == OLD_MAGIC
            if not old and not zipfile.is_zipfile(file):
                raise ArtifactError(
                    f"{path.name} is not what torch.save writes: save it again, as"
                    " model.safetensors (save_pretrained) if possible"
                )
            if old:
                content = file.read(MAX_PICKLE_BYTES)
            else:
                with zipfile.ZipFile(file) as archive:
                    content, entries = _unzip(path.name, archive)
    except _DAMAGED as error:
        raise ArtifactError(f"{path.name} is damaged: {error}") from None
    data, stream = map_file(path), io.BytesIO(content)
    try:
        if old:
            state = _load_old(path.name, data, stream)
        else:
            state = _load(path.name, data, stream, entries)
    except _NONSENSE:
        raise ArtifactError(f"{path.name} is damaged: its pickle makes no sense") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ArtifactError(f"{path.name} holds no state_dict, which is a dict of named tensors")
    tensor_index.check_count(len(state), path.name)
    for name, value in state.items():
        if isinstance(value, dict) and any(isinstance(v, Tensor) for v in value.values()):
            raise ArtifactError(
                f"{path.name} is a checkpoint of a training, its weights are under {name!r} (keys:"
                f" {', '.join(state)}): save them alone, torch.save(torch.load(...)[{name!r}], ...)"
            )
    return {
        tensor_index.check_name(name, path.name): tensor.check(name, len(data))
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    }


def _unzip(file: str, archive: zipfile.ZipFile) -> tuple[bytes, dict[str, zipfile.ZipInfo]]:
    """Return the pickle, and the entries by their names inside the folder that has them all."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    pickles = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1 or entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise ArtifactError(f"{file} is not what torch.save writes: no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    order = entries.get(folder + "byteorder")
    if order is not None and (order.file_size > 10 or archive.read(order) != b"little"):
        raise ArtifactError(f"{file} is big-endian: save it on a little-endian machine")
    inside = {n.removeprefix(folder): e for n, e in entries.items() if n.startswith(folder)}
    return archive.read(pickles[0]), inside


def _load(
    file: str, data: NDArray[np.uint8], stream: io.BytesIO, entries: Mapping[str, zipfile.ZipInfo]
) -> Any:
    """Read a pickle whose storages are entries of an archive."""

    def find(description: Any) -> _Storage:
        """Find a storage by its description: ('storage', class, key, device, count)."""
        _, kind, key, _, count = description
        dtype, entry = _dtype(file, kind), entries[f"data/{key}"]
        # The lengths of the name and the padding are in the entry's local header.
        header = data[entry.header_offset : entry.header_offset + 30].tobytes()
        name_bytes, extra_bytes = struct.unpack("<26xHH", header)
        begin = entry.header_offset + 30 + name_bytes + extra_bytes
        if type(count) is not int or count < 0 or entry.compress_type != zipfile.ZIP_STORED:
            raise ArtifactError(f"{file} is damaged: its tensors are packed")
        end = begin + count * DTYPES[dtype].itemsize
        if end > min(len(data), begin + entry.file_size):
            raise ArtifactError(f"{file} is cut short")
        return _Storage(file, begin, dtype, count)

    return _Unpickler(stream, file, find).load()


def _dtype(file: str, kind: Any) -> str:
    """Return the dtype of a storage by its class in the pickle. Raises `ArtifactError`."""
    if not isinstance(kind, _Global) or kind.name not in STORAGES:
        raise ArtifactError(
            f"{file} holds numbers of an unknown type ({getattr(kind, 'name', kind)})"
        )
    return STORAGES[kind.name]


def _load_old(file: str, data: NDArray[np.uint8], stream: io.BytesIO) -> Any:
    """Read a file by torch before 1.6; `stream` follows the magic number.

    The file has a protocol, machine, object and keys, each a pickle; then each storage, as a count
    and the numbers. The object is read twice, because the keys after it give its storages' order.
    """
    sizes, begins = dict[str, int](), dict[str, int]()  # in bytes

    def find(description: Any) -> _Storage:
        """Find a storage by its description: ('storage', class, key, device, count, view)."""
        _, kind, key, _, count, view = description
        dtype = _dtype(file, kind)
        if view is not None or type(count) is not int or count < 0:
            raise ValueError("no storage of its own")
        sizes[key] = count * DTYPES[dtype].itemsize
        return _Storage(file, begins.get(key, 0), dtype, count)

    def load() -> Any:
        return _Unpickler(stream, file, find).load()

    if load() != OLD_PROTOCOL:
        raise ValueError("another protocol")
    if not load()["little_endian"]:
        raise ArtifactError(f"{file} is big-endian: save it on a little-endian machine")
    start = stream.tell()
    load()
    keys = load()
    if not isinstance(keys, list) or set(keys) != set(sizes):
        raise ValueError("other storages")
    position = len(OLD_MAGIC) + stream.tell()
    for key in keys:
        begins[key] = position + 8
        position += 8 + sizes[key]
    if position > len(data):
        raise ArtifactError(f"{file} is cut short")
    stream.seek(start)
    return load()


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    """Return a view of a storage. Strides count numbers, not bytes, and may be in any order."""
    if not isinstance(storage, _Storage):
        raise ValueError("no storage")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides):
        raise ValueError("no strides")
    if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
        raise ValueError("no natural numbers")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if all(shape) and last >= storage.length:
        raise ValueError("beyond the storage")
    size = DTYPES[storage.dtype].itemsize
    begin = storage.begin + offset * size
    return Tensor(storage.file, begin, storage.dtype, shape, tuple(s * size for s in strides))


_CALLS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": lambda: {},
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": lambda data, *rest: data,
}
_OPCODES = """
    PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL REDUCE BINPERSID
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT INT LONG
    BINUNICODE SHORT_BINUNICODE UNICODE BINUNICODE8
    EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    BINGET LONG_BINGET GET BINPUT LONG_BINPUT PUT MEMOIZE
"""


# Opcodes that make instances of classes.
OBJECTS = {code[0] for code in (pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.OBJ, pickle.INST)}


class _Global:
    """A global name in the pickle; only the names in `_CALLS` can be called."""

    def __init__(self, file: str, name: str) -> None:
        self._file, self.name = file, name

    def __call__(self, *arguments: Any) -> Any:
        if self.name not in _CALLS:
            raise ArtifactError(
                f"{self._file} would call {self.name.replace(' ', '.')}: only plain weights are"
                " read, a state_dict as save_pretrained writes it"
            )
        return _CALLS[self.name](*arguments)


class _Opcodes(dict[int, Any]):
    """The functions of the opcodes; those that no state_dict needs are refused."""

    def __init__(self, file: str) -> None:
        codes = (getattr(pickle, name)[0] for name in _OPCODES.split())
        super().__init__({code: pickle._Unpickler.dispatch[code] for code in codes})
        # Drop attributes of the state_dict itself, such as _metadata.
        self[pickle.BUILD[0]] = lambda unpickler: unpickler.stack.pop()
        self._file = file

    def __missing__(self, code: int) -> Any:
        if code in OBJECTS:
            raise ArtifactError(
                f"{self._file} holds a whole pickled object (torch.save(model)): save its weights,"
                " with model.save_pretrained(folder) or torch.save(model.state_dict(), ...)"
            )
        raise ArtifactError(
            f"{self._file}: its pickle holds {chr(code)!r}, which no state_dict needs"
        )


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python: the one in C allocates any size that a file announces."""

    def __init__(self, stream: io.BytesIO, file: str, find: Callable[[Any], _Storage]) -> None:
        super().__init__(stream)
        self._file, self._find = file, find
        self.dispatch = _Opcodes(file)  # type: ignore[misc]

    def find_class(self, module: str, name: str) -> _Global:
        if len(module) + len(name) > MAX_GLOBAL:
            raise ValueError("no name")
        return _Global(self._file, f"{module} {name}")

    def persistent_load(self, description: Any) -> _Storage:
        return self._find(description)
