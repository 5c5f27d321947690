"""Prepared models: weights packed, in int8 or fp32, in one file that the native library maps.

The file is in the safetensors format, with aligned tensors, and is the same on every processor. Its
metadata have the hash of the weights that it was made of, and the hash of its own data. The data is
compared with that once after each start of the machine, because a crash may have cut off what was
not on the disk yet.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from common.cpus import cpu_count
from common.errors import ArtifactError, OutOfMemory
from common.memory import MIB
from engine.artifacts import artifact as names
from engine.artifacts.adapter import Adapter
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.merged import Merged, merge
from engine.artifacts.read_safetensors import DTYPES, read_safetensors
from engine.backends.page_cache import Span
from engine.native import library, rotation
from engine.native.rotation import Floats
from engine.prepared import folder as folders
from engine.prepared import manifest as manifests
from engine.prepared.folder import cache_folder
from engine.prepared.manifest import Run, directly, to_manifest
from engine.sandbox import Limits

FORMAT = 4  # raise it when the layout or the quantization changes
SOURCE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}  # pass.h, SourceType
GROUPS_AT_ONCE = 256  # groups of columns that a thread packs in one task
ALIGNMENT = 4096  # bytes, of the first tensor
ALIGNED = 32  # bytes, of each tensor: an adapter's rows of fp16 are half a cache line
# Limits of the process that builds a file: its memory holds libraries, the weights before and after
# merging, and the file, which is mapped.
BUILD_MIB, BUILD_TIMES_FP32 = 512, 4
BUILD_CPU_S, BUILD_BYTES_PER_CPU_S = 60, 10 * MIB

logger = logging.getLogger(__name__)

_lost: set[Path] = set()  # files that are compared with their checksums when they are next mapped

Sources = list[
    tuple[str, Any]
]  # path and manifest of an artifact, and of an adapter merged into it


@dataclass(frozen=True)
class Stored:
    """A tensor of a prepared file; `dtype` is a name of the safetensors format."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def type(self) -> str:
        """The name of numpy's type."""
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.type).itemsize


@dataclass(frozen=True)
class Entry(Stored):
    """A tensor of a model: a packed matrix of n columns of k numbers, or n rows of k floats."""

    source: str  # its name in an artifact
    n: int
    k: int
    precision: str | None  # None: no packed matrix


def _entry(name: str, source: str, shape: tuple[int, ...], precision: str | None) -> Entry:
    n, k = shape if len(shape) == 2 else (1, *shape)
    groups, line = -(-n // library.LINE), library.LINE
    stored: tuple[int, ...] = (groups, k, line)
    if precision is None:
        stored = (n, -(-k // line) * line)
    elif precision == "int8":
        stored = (groups, library.packed_bytes(n, k, True) // groups)
    return Entry(name, stored, "U8" if precision == "int8" else "F32", source, n, k, precision)


def layout(config: GPT2Config, precision: str) -> Iterator[Entry]:
    """Yield the tensors of a model's prepared file, in order."""
    sources = {
        "embedding.weight": names.EMBEDDING,
        "head.weight": names.OUTPUT,
        "positions": names.POSITIONS,
    }
    blocks = {
        f"layers.{i}.{name}": pattern.format(i)
        for i in range(config.num_layers)
        for name, pattern in (names.PRODUCTS | names.NORMS).items()
    }
    for name, source in {**blocks, "final_norm": names.FINAL_NORM}.items():
        if precision == "int8" and name.endswith(("attention_norm", "ffn_norm")):
            continue  # it is in the matrix behind it
        parts = ("gamma", "beta") if name.endswith("norm") else ("weight", "bias")
        sources |= {f"{name}.{part}": f"{source}.{part}" for part in parts}
    shapes = dict(names.shapes(config))
    for name, source in sources.items():
        packed = precision if name.endswith(".weight") else None
        if source in shapes:  # a tied head has no weights of its own
            yield _entry(name, source, shapes[source], packed)


def num_bytes(config: GPT2Config, precision: str) -> int:
    """Return the bytes of a model's weights in its prepared file."""
    return sum(entry.num_bytes for entry in layout(config, precision))


# The tensors of a file, in order, by its metadata.
Layout = Callable[[Mapping[str, str]], Iterable[Stored]]


class PreparedFile:
    """A mapped prepared file, and the addresses of its tensors by their names."""

    def __init__(self, path: Path, layout: Layout, content: str) -> None:
        """Map a file.

        Raises `ArtifactError` and `OSError` where it does not exist, is not whole, or has other
        tensors or those of another `content`.
        """
        self.path = path
        index, self.metadata, data_begin = read_safetensors(path)
        metadata = self.metadata
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(self._memory, np.uint8)
        self.num_bytes = len(data)
        self.span: Span = (data.ctypes.data, len(data))
        self._mapping = library.Mapping(begin=self.span[0], size=self.num_bytes)
        library.guard(self._mapping)
        self._end_guard = weakref.finalize(self, library.end_guard, self._mapping)
        expected = {entry.name: entry for entry in layout(metadata)}
        for name, tensor in index.items():
            entry = expected.pop(name, None)
            place = None if entry is None else (entry.type, entry.shape)
            if (tensor.dtype, tensor.shape) != place or tensor.offset % ALIGNED:
                raise ArtifactError(f"{path.name}: {name} is not of this model")
        if expected or metadata.get("source") != content:
            raise ArtifactError(f"{path.name} is not of this model")
        if folders.is_older_than_boot(path) or path in _lost:
            if metadata.get("blake3") != digest(data[data_begin:]):
                raise ArtifactError(f"{path.name} is damaged")
            _lost.discard(path)
            with suppress(OSError):  # another user's file: it is hashed again after the next start
                os.utime(path)
        self.addresses = {name: self.span[0] + tensor.offset for name, tensor in index.items()}

    def is_lost(self) -> bool:
        """Return whether the file was cut off or cannot be read, so that results of it are wrong.

        When it is next mapped, it is then compared with its checksum.
        """
        # 1 us. In the last page of a file that is cut off there, the mapping has zeros.
        lost = bool(self._mapping.lost) or self._memory.size() < self.num_bytes
        if lost:
            _lost.add(self.path)
        return lost

    def close(self) -> None:
        """Unmap the file, if it is mapped; nothing may point into it any more."""
        if not self._end_guard.alive:
            return
        self.is_lost()
        self.addresses = {}
        self._end_guard()
        self._memory.close()


@dataclass(frozen=True)
class Prepared:
    """A model's configuration and its mapped prepared file."""

    config: GPT2Config
    precision: str
    file: PreparedFile

    def close(self) -> None:
        self.file.close()


def digest(data: NDArray[np.uint8]) -> str:
    """Return the checksum of a file's data, which is in its metadata."""
    return blake3(data.data, max_threads=blake3.AUTO).hexdigest()


def prepared(
    artifact: Artifact, precision: str, cache_dir: Path | None, run: Run = directly
) -> Prepared:
    """Open the artifact's prepared model, which `run` builds if it does not exist.

    The file is in `cache_dir` or, without that, in `.prepared` in the artifact's folder; a file
    that came with the artifact is used there. If the folder cannot be written, the file is built in
    a temporary folder and deleted once it is mapped. Raises `ArtifactError`, and `OutOfMemory`,
    also if no disk has space.
    """
    config, content = artifact.config, artifact.content or manifests.content_of(artifact)
    fp32 = artifact.fp32_bytes
    sources = sources_of(dataclasses.replace(artifact, content=content))
    limits = Limits(
        memory_mib=BUILD_MIB + BUILD_TIMES_FP32 * fp32 // MIB,
        cpu_s=BUILD_CPU_S + fp32 // BUILD_BYTES_PER_CPU_S,
        niceness=manifests.NICENESS,
    )
    file = open_prepared(
        artifact.path,
        [content, precision, non_defaults(config)],
        lambda _: layout(config, precision),
        list(layout(config, precision)),
        content,
        cache_dir,
        functools.partial(run, build, sources, precision, what="the model", limits=limits),
    )
    return Prepared(config, precision, file)


def sources_of(artifact: Artifact) -> Sources:
    """Return what `artifact_of` makes an artifact of."""
    parts: list[Artifact | Adapter] = [artifact]
    if isinstance(artifact, Merged):
        parts = [artifact.base, artifact.adapter]
    return [(str(part.path), to_manifest(part)) for part in parts]


def non_defaults(config: GPT2Config) -> dict[str, Any]:
    """Return the fields that are no defaults, so that a new field renames no prepared file."""
    values = dataclasses.asdict(config)
    return {
        f.name: values[f.name] for f in dataclasses.fields(config) if values[f.name] != f.default
    }


def open_prepared(
    path: Path,
    key: list[Any],
    layout: Layout,
    largest: Sequence[Stored],
    content: str,
    cache_dir: Path | None,
    build: Callable[..., int],
) -> PreparedFile:
    """Open the prepared file of the artifact in `path`; `build` fills it if it does not exist.

    key: a JSON value that identifies the file's content
    layout: its tensors, by its metadata
    largest: tensors with at least as many bytes
    content: the hash of the weights that it is made of
    build: calls `write` for the file at the path `file`, which has zeros then; returns what it does

    Uses the folders and raises the errors of `prepared`.
    """
    name = f"{folders.hash_of(json.dumps([FORMAT, *key]))}{folders.MODEL}"
    folder = cache_folder(path, cache_dir)
    if folder is None:
        logger.warning("%s: its prepared models are another user's", path)
    for place in dict.fromkeys((folder, cache_folder(path, None))):
        if place is None:
            continue
        with suppress(ArtifactError, OSError):
            prepared_file = PreparedFile(place / name, layout, content)
            with suppress(OSError):
                os.utime(place / name)  # when it was used last, see prune
            return prepared_file

    def build_in(folder: Path) -> PreparedFile:
        folder.mkdir(parents=True, exist_ok=True)
        folders.remove_abandoned(folder)
        began = time.monotonic()
        with folders.written_whole(folder / name) as path_of_new, path_of_new.open("wb") as new:
            # on a full disk this fails; a later write to a mapping would raise a signal
            _, begin, data_bytes = header_of(largest, {"source": content})
            os.posix_fallocate(new.fileno(), 0, begin + data_bytes + ALIGNMENT)
            os.truncate(path_of_new, build(file=path_of_new))
            path_of_new.chmod(0o644)
        logger.info("prepared %s in %.2f s", path.name, time.monotonic() - began)
        try:
            return PreparedFile(folder / name, layout, content)
        except ArtifactError as error:
            raise OSError(f"{folder} does not keep what is written: {error.message}") from error

    if folder is not None:
        try:
            return build_in(folder)
        except OSError as error:
            logger.warning("cannot keep a prepared model in %s: %s", folder, error)
    try:
        with tempfile.TemporaryDirectory(prefix="prepared-") as temporary:
            return build_in(Path(temporary))
    except OSError as error:
        raise OutOfMemory("no disk has space to prepare the model") from error


# In the sandbox


def build(sources: Sources, precision: str, file: int) -> int:
    """Write the prepared file of an artifact; returns its bytes."""
    artifact = artifact_of(sources)
    entries = list(layout(artifact.config, precision))
    return write(
        file, entries, {"source": artifact.content}, functools.partial(_fill, artifact, entries)
    )


def artifact_of(sources: Sources) -> Artifact:
    """Return an artifact, with an adapter merged into its weights if there is one."""
    (path, manifest), *adapters = sources
    artifact = manifests.from_manifest(Path(path), manifest)
    for path, manifest in adapters:
        artifact = merge(artifact, manifests.adapter_from_manifest(Path(path), manifest))
    return artifact


def header_of(
    entries: Iterable[Stored], metadata: Mapping[str, str]
) -> tuple[dict[str, Any], int, int]:
    """Return a prepared file's header, where its data begins, and the data's bytes."""
    header: dict[str, Any] = {"__metadata__": {**metadata, "blake3": "0" * 64}}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.num_bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        at += entry.num_bytes
    return header, -(-(8 + len(json.dumps(header))) // ALIGNMENT) * ALIGNMENT, at


def write(
    file: int,
    entries: Iterable[Stored],
    metadata: Mapping[str, str],
    fill: Callable[[NDArray[np.uint8]], object],
) -> int:
    """Write a prepared file, which is large enough, by its descriptor; returns its bytes.

    metadata: `source` is the content that `PreparedFile` compares
    fill: writes the tensors, one behind the other
    """
    header, begin, data_bytes = header_of(entries, metadata)
    size = begin + data_bytes
    # The mapping ends with its last array: an error's traceback may still hold one.
    data = np.frombuffer(mmap.mmap(file, size), np.uint8)
    fill(data[begin:])
    header["__metadata__"]["blake3"] = digest(data[begin:])
    text = json.dumps(header).encode().ljust(begin - 8)
    data[:begin] = np.frombuffer((begin - 8).to_bytes(8, "little") + text, np.uint8)
    return size


def write_arrays(
    file: int,
    entries: Sequence[Stored],
    metadata: Mapping[str, str],
    arrays: Mapping[str, NDArray[Any]],
) -> int:
    """Write a prepared file of arrays as `write` does, by the names of its tensors."""

    def fill(data: NDArray[np.uint8]) -> None:
        at = 0
        for entry in entries:
            data[at : at + entry.num_bytes] = arrays[entry.name].reshape(-1).view(np.uint8)
            at += entry.num_bytes

    return write(file, entries, metadata, fill)


def save_arrays(
    path: Path,
    entries: Sequence[Stored],
    metadata: Mapping[str, str],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """Write a new file as `write_arrays` does."""
    _, begin, data_bytes = header_of(entries, metadata)
    with path.open("w+b") as file:
        file.truncate(begin + data_bytes)
        write_arrays(file.fileno(), entries, metadata, arrays)


def _fill(artifact: Artifact, entries: list[Entry], data: NDArray[np.uint8]) -> None:
    """Quantize or pack an artifact's weights, on all cores."""
    ends = itertools.accumulate(entry.num_bytes for entry in entries)
    places = {e.name: data[end - e.num_bytes : end] for e, end in zip(entries, ends, strict=True)}
    rotates = entries[0].precision == "int8"
    with ThreadPoolExecutor(cpu_count()) as pool:
        futures = []
        if rotates:
            of_layers = {entry.name: entry for entry in entries if entry.name.startswith("layers.")}
            for layer in range(artifact.config.num_layers):
                futures.append(pool.submit(_fill_layer, artifact, layer, of_layers, places))
        for entry in entries:
            if rotates and entry.name in of_layers:
                continue
            weight, place = artifact.weights[entry.source], places[entry.name]
            if entry.precision is None:
                _fill_rows(weight, entry, place, rotates and entry.name == "positions")
            else:
                for first in range(0, entry.shape[0], GROUPS_AT_ONCE):
                    futures.append(pool.submit(_fill_groups, weight, entry, place, first))
        for future in futures:
            future.result()


def _fill_rows(weight: NDArray[Any], entry: Entry, place: NDArray[np.uint8], rotates: bool) -> None:
    rows = rotation.floats(weight)
    if rotates:
        rotation.rotate_rows(rows, entry.k)
    place.view(np.float32).reshape(entry.shape)[:, : entry.k] = rows


def _fill_layer(
    artifact: Artifact,
    layer: int,
    entries: Mapping[str, Entry],
    places: Mapping[str, NDArray[np.uint8]],
) -> None:
    """Rotate and quantize the products of a layer."""
    config = artifact.config
    factors = rotation.head_factors(artifact.weights, layer)
    hidden = np.zeros(0, np.float32)
    for product in library.PRODUCTS:
        name = f"layers.{layer}.{product}"
        entry, place = entries[f"{name}.weight"], places[f"{name}.weight"]
        weight, bias = rotated_product(artifact, layer, product, factors)
        _pack(weight, entry, place)
        if product == "ffn_hidden":
            mean = rotation.mean_hidden(weight, bias)[None]
            hidden = rotation.rotate_inputs("ffn_out", mean, config, factors)
        if product == "ffn_out":
            rounded = np.empty_like(weight)
            library.unpack_int8(place.ctypes.data, *weight.shape, rounded.ctypes.data)
            weight -= rounded
            addresses = weight.ctypes.data, hidden.ctypes.data
            library.add_products(*addresses, *weight.shape, bias.ctypes.data)
        places[f"{name}.bias"].view(np.float32)[: entry.n] = bias


def rotated_product(
    artifact: Artifact, layer: int, product: str, factors: Floats
) -> tuple[Floats, Floats]:
    """Return weight (n, k) and bias (n,) of a product of a layer in the rotated basis."""
    weights, name = artifact.weights, names.PRODUCTS[product].format(layer)
    weight = rotation.floats(weights[f"{name}.weight"])
    bias = rotation.floats(weights[f"{name}.bias"])[0]
    if (norm := rotation.norm_before(layer, product)) is not None:
        rotation.fold_norm(weight, bias, weights[f"{norm}.gamma"], weights[f"{norm}.beta"])
    return rotation.rotated_product(product, weight, bias, artifact.config, factors)


def _fill_groups(weight: NDArray[Any], entry: Entry, place: NDArray[np.uint8], first: int) -> None:
    """Pack some groups of columns of a matrix; rotate those of the embedding and the head."""
    rows = weight[first * library.LINE : (first + GROUPS_AT_ONCE) * library.LINE]
    if entry.precision == "int8":
        rows = rotation.floats(rows)
        rotation.rotate_rows(rows, entry.k)
    _pack(rows, entry, place[first * (entry.num_bytes // entry.shape[0]) :])


def _pack(weight: NDArray[Any], entry: Entry, place: NDArray[np.uint8]) -> None:
    """Pack a matrix (n, k), or whole groups of its columns, in an entry's precision."""
    strides = (stride // weight.itemsize for stride in weight.strides)
    matrix = (weight.ctypes.data, SOURCE_TYPES[weight.dtype.name], *strides, *weight.shape)
    library.pack(*matrix, entry.precision == "int8", place.ctypes.data)
