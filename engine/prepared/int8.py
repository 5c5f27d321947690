"""Models prepared for MXNet in int8, kept beside those for onnxruntime (`engine.prepared.cache`).

A row of a matrix is its numbers in int8 and a scale, which is its largest magnitude / 127. No
processor and no version of a library has a form of its own.

    <hash>.bin      a matrix's numbers, or a model's scales, sums of rows, biases and LayerNorms
    <key>.json      which tensor of a model lies where
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.cpus import cpu_count
from engine.artifacts.artifact import POSITIONS, Artifact, shapes
from engine.artifacts.config import GPT2Config
from engine.backends.onnx.quantize import ZERO, quantize
from engine.backends.page_cache import Span
from engine.prepared.entries import is_there, make_entry, read_entry
from engine.prepared.files import OWN_FILE_BYTES, Store, hash_of
from engine.prepared.kept import kept, run_build
from engine.prepared.manifest import Run, content_of, directly, from_manifest

FORMAT = 1  # raise it when the quantization changes
ALIGNMENT = 64


class Int8Weights(Mapping[str, NDArray[Any]]):
    """Tensors of a model, mapped: of a matrix `NAME.weight` (N, K) `NAME.q` in int8, the scales
    `NAME.scale` (N,) and the sums of the scaled rows `NAME.sum` (N,); others as they are, in fp32.
    """

    def __init__(self, folder: Path, tensors: dict[str, list[Any]]) -> None:
        """`tensors`: file, offset, type and shape of each."""
        files = {name: np.memmap(folder / name, np.uint8, "r") for name, *_ in tensors.values()}
        self._tensors: dict[str, NDArray[Any]] = {
            name: np.ndarray(shape, dtype, files[file], offset)
            for name, (file, offset, dtype, shape) in tensors.items()
        }
        self.spans: list[Span] = [(file.ctypes.data, file.nbytes) for file in files.values()]
        self.num_bytes = sum(file.nbytes for file in files.values())

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def num_bytes(config: GPT2Config) -> int:
    """What the weights of a model take, but for what aligns them."""
    return sum(
        math.prod(shape) + 8 * shape[0] if _is_matrix(name, shape) else 4 * math.prod(shape)
        for name, shape in shapes(config)
    )


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is quantized."""
    return len(shape) == 2 and name != POSITIONS


@contextmanager
def prepared(
    artifact: Artifact, cache_dir: Path | None, run: Run = directly
) -> Iterator[Int8Weights]:
    """Finds the artifact in the cache or has `run` build it there, see `kept`."""
    parts = [FORMAT, artifact.content or content_of(artifact), dataclasses.asdict(artifact.config)]
    key = hash_of(json.dumps(["mxnet", "int8", *parts], sort_keys=True))

    def build_in(folder: Path) -> str | None:
        said: str | None = run_build(run, build, artifact, str(folder), key)
        return said

    with kept(artifact, key, cache_dir, _read, build_in) as found:
        yield found


def _read(path: Path) -> Int8Weights:
    """Raises one of `MALFORMED`."""
    return Int8Weights(path.parent, read_entry(path)["tensors"])


# In the sandbox


def build(path: str, manifest: dict[str, Any], folder: str, key: str) -> str | None:
    """Builds the entry if it is not there. Says what is wrong with a folder, if it is that."""
    artifact = from_manifest(Path(path), manifest)
    try:
        if not is_there(entry := Path(folder) / f"{key}.json", _read):
            make_entry(entry, partial(_make, artifact))
    except OSError as error:
        return str(error)
    return None


def _make(artifact: Artifact, store: Store) -> dict[str, Any]:
    store.check_room(num_bytes(artifact.config))
    tensors: dict[str, list[Any]] = {}
    small: list[memoryview] = []
    at = 0

    with ThreadPoolExecutor(cpu_count()) as pool:
        made = pool.map(partial(_tensors, artifact), (name for name, _ in shapes(artifact.config)))
        for name, array in itertools.chain.from_iterable(made):
            data, said = array.reshape(-1).view(np.uint8).data, [array.dtype.str, array.shape]
            if array.nbytes >= OWN_FILE_BYTES:
                tensors[name] = [store.add([data], ".bin"), 0, *said]
            else:
                tensors[name] = ["", at, *said]
                padding = -array.nbytes % ALIGNMENT
                small += [data, memoryview(bytes(padding))]
                at += array.nbytes + padding
    file = store.add(small, ".bin")
    return {"tensors": {n: [f or file, *rest] for n, (f, *rest) in tensors.items()}}


def _tensors(artifact: Artifact, name: str) -> list[tuple[str, NDArray[Any]]]:
    weight = artifact.weights[name]
    if not _is_matrix(name, weight.shape):
        return [(name, np.ascontiguousarray(weight, np.float32))]
    numbers, scale = quantize(weight, weight.shape[1])
    numbers ^= np.uint8(ZERO)  # without the offset, in two's complement
    q = numbers.reshape(weight.shape).view(np.int8)
    name = name.removesuffix(".weight")
    sums = q.sum(axis=1, dtype=np.int32).astype(np.float32) * scale
    return [(f"{name}.q", q), (f"{name}.scale", scale), (f"{name}.sum", sums)]
