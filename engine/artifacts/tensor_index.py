"""An index of the tensors in a model's files, which is checked before any array is made.

`Tensor.check` compares each tensor with the length of its file and with limits before `map_index`
maps it, so an index may come from untrusted data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from engine.artifacts.files import map_file, open_file, readable

Weights = dict[str, NDArray[Any]]

_NAMES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
MAX_DIMENSIONS = 32  # numpy's limit before version 2
MAX_NUMBERS = 1 << 48
MAX_TENSORS = 20_000
MAX_NAME = 1000


class Tensor(NamedTuple):
    """A view of a file's bytes; `offset` and `strides` are in bytes."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize

    @property
    def T(self) -> Tensor:
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def check(self, name: str, file_bytes: int) -> Tensor:
        """Return the tensor if it is inside a file of this length. Raises `ArtifactError`."""
        if self.dtype not in DTYPES:
            raise ArtifactError(f"{self.file}: {name} is of the unknown type {self.dtype}")
        if self.ndim > MAX_DIMENSIONS:
            raise ArtifactError(
                f"{self.file}: {name} has {self.ndim} dimensions, at most {MAX_DIMENSIONS} can be"
            )
        numbers = (self.offset, *self.shape, *self.strides)
        natural = all(type(n) is int and n >= 0 for n in numbers)
        possible = natural and math.prod(max(n, 1) for n in self.shape) <= MAX_NUMBERS
        if len(self.strides) != self.ndim or not possible:
            raise ArtifactError(f"{self.file}: {name} has no possible shape (damaged)")
        if not self.size:
            return self
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if self.offset + last + DTYPES[self.dtype].itemsize > file_bytes:
            raise ArtifactError(f"{self.file} is cut short: {name} is not all there")
        if self.nbytes > file_bytes:
            raise ArtifactError(f"{self.file}: {name} has more numbers than the file")
        return self


Index = dict[str, Tensor]


def contiguous(file: str, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in row-major order from byte `offset` of a file on."""
    strides, step = [], DTYPES[dtype].itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Tensor(file, offset, dtype, shape, tuple(reversed(strides)))


def check_name(name: str, file: str) -> str:
    """Return the name. Raises `ArtifactError` if it is too long or not valid Unicode."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ArtifactError(f"{file}: the name of a tensor is no text: {name!a}") from None
    if len(name) > MAX_NAME:
        raise ArtifactError(f"{file}: the name of a tensor has {len(name)} characters")
    return name


def check_count(count: int, file: str) -> None:
    if count > MAX_TENSORS:
        raise ArtifactError(f"{file} holds {count} tensors, at most {MAX_TENSORS} can be")


def map_index(folder: Path, index: Mapping[str, Tensor]) -> Weights:
    """Map arrays read-only from files in `folder`. Raises `ArtifactError`."""
    data: dict[str, NDArray[np.uint8]] = {}
    weights: Weights = {}
    for name, tensor in index.items():
        if tensor.file not in data:
            data[tensor.file] = map_file(folder / tensor.file)
        mapped = data[tensor.file]
        tensor.check(name, len(mapped))
        dtype = DTYPES[tensor.dtype]
        if tensor.size:
            weights[name] = np.ndarray(tensor.shape, dtype, mapped, tensor.offset, tensor.strides)
        else:
            weights[name] = np.empty(tensor.shape, dtype)
    return weights


def read_tensor(folder: Path, name: str, tensor: Tensor) -> NDArray[Any]:
    """Read a small tensor without a mapping, in which a shortened file would crash the process.

    Raises `ArtifactError`, also for a tensor with gaps.
    """
    path = folder / tensor.file
    try:
        with open_file(path) as file, readable(path.name):
            tensor.check(name, os.fstat(file.fileno()).st_size)
            content = os.pread(file.fileno(), tensor.nbytes, tensor.offset)
        dtype = DTYPES[tensor.dtype]
        return np.ndarray(tensor.shape, dtype, content, 0, tensor.strides)
    except (FileNotFoundError, TypeError, ValueError):  # numpy: the buffer is too small
        raise ArtifactError(f"{tensor.file}: {name} cannot be read") from None
