"""Reads MXNet's `.params` files with numpy alone, the arrays mapped from the file.

It needs no MXNet (1.2 s and 276 MB to import), copies nothing, and checks every length, so a
damaged file gives an error instead of a crash. Format: `NDArray::Save` in MXNet's
src/ndarray/ndarray.cc, versions 2 and 3, little endian, dense arrays.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from common.errors import ArtifactError
from engine.artifacts import tensor_index
from engine.artifacts.files import map_file
from engine.artifacts.tensor_index import DTYPES, Index, Tensor, Weights

LIST_MAGIC = 0x112
ARRAY_MAGIC = {0xF993FAC9, 0xF993FACA}
CODES = {0: "float32", 1: "float64", 2: "float16", 3: "uint8", 4: "int32", 5: "int8", 6: "int64"}


class _Reader:
    def __init__(self, path: Path) -> None:
        self.file = path.name
        # Only the headers of the arrays are read: reading ahead would read most of the file.
        self.data = map_file(path, mmap.MADV_RANDOM)
        if len(self.data) < 24:
            raise ArtifactError(f"{self.file} is not an MXNet .params file: it is too short")
        self.at = 0

    def skip(self, size: int) -> int:
        """Skip bytes; returns the offset where they begin."""
        if size < 0 or self.at + size > len(self.data):
            raise ArtifactError(
                f"{self.file} is cut short: it ends at byte {len(self.data)},"
                f" but more was announced at byte {self.at}"
            )
        self.at += size
        return self.at - size

    def take(self, size: int) -> bytes:
        begin = self.skip(size)
        return self.data[begin : self.at].tobytes()

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value


def read_params(path: Path) -> Weights:
    """Map a file's arrays by name, without `arg:` and `aux:`. Raises `ArtifactError`."""
    return tensor_index.map_index(path.parent, index_params(path))


def index_params(path: Path) -> Index:
    """Index a file's arrays by name, without `arg:` and `aux:`. Raises `ArtifactError`."""
    r = _Reader(path)
    if r.number("Q") != LIST_MAGIC:
        raise ArtifactError(f"{path.name} is not an MXNet .params file")
    r.number("Q")
    arrays = [_index_array(r) for _ in range(_count(r))]
    names = [r.take(r.number("Q")).decode("utf-8", "replace") for _ in range(_count(r))]
    if len(names) != len(arrays):
        raise ArtifactError(f"{path.name} holds {len(arrays)} arrays but {len(names)} names")
    return {
        tensor_index.check_name(name.removeprefix("arg:").removeprefix("aux:"), path.name): array
        for name, array in zip(names, arrays, strict=True)
    }


def _count(r: _Reader) -> int:
    count = r.number("Q")
    if count <= len(r.data):  # otherwise reading on reports a file that is cut short
        tensor_index.check_count(count, r.file)
    return count


def _index_array(r: _Reader) -> Tensor:
    if r.number("I") not in ARRAY_MAGIC:
        raise ArtifactError(f"{r.file}: no array begins at byte {r.at - 4} (damaged or too old)")
    if r.number("i") != 0:
        raise ArtifactError(f"{r.file} holds a sparse array; only dense ones can be served")
    dimensions = r.number("i")
    if not 0 <= dimensions <= tensor_index.MAX_DIMENSIONS:
        raise ArtifactError(f"{r.file}: an array has {dimensions} dimensions (damaged file)")
    shape = tuple(r.number("q") for _ in range(dimensions))
    if any(size < 0 for size in shape):
        raise ArtifactError(f"{r.file}: an array has a negative size (damaged file)")
    r.skip(8)  # device type and number
    code = r.number("i")
    if code not in CODES:
        raise ArtifactError(f"{r.file}: unknown number type {code}")
    begin = r.skip(math.prod(shape) * DTYPES[CODES[code]].itemsize)
    array = tensor_index.contiguous(r.file, begin, CODES[code], shape)
    return array.check("an array", len(r.data))
