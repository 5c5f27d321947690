"""Prepared models: a mapped file for each, which the native library computes with as it is.

The file is in the safetensors format, its tensors at multiples of 64 bytes from a page on. It is
the same on every processor. Its metadata have the hash of the weights that it was made of, and of
its own bytes: a file that is older than the machine's start is compared with that once, because a
crash may have cut off what was not on the disk yet.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from common.cpus import cpu_count
from common.errors import ArtifactError, OutOfMemory
from common.memory import MIB
from engine.artifacts import artifact as names
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.merged import Merged, merge
from engine.artifacts.read_safetensors import read_safetensors
from engine.backends.page_cache import Span
from engine.native import library
from engine.prepared.folder import (
    BUILDING,
    MODEL,
    cache_folder,
    hash_of,
    is_older_than_boot,
    remove_abandoned,
)
from engine.prepared.manifest import (
    NICENESS,
    Run,
    adapter_from_manifest,
    adapter_to_manifest,
    content_of,
    directly,
    from_manifest,
    to_manifest,
)
from engine.sandbox import Limits

FORMAT = 1  # raise it when the layout or the quantization changes
BLOCKS = {"int8": 64, "fp32": 0}  # numbers that share a scale
# Planes of int8 numbers of x in each product: one has 8 bits, two have 15. With two for
# `ffn_hidden` logits are off by 1.2 to 1.5% of their deviation on the demo models instead of 1.3 to
# 1.8%, for nothing at one row and 10 to 14% of the time of eight rows and of prompts; two for all
# would give 0.9 to 1.0% for half the speed.
PLANES = {"qkv": 1, "attention_out": 1, "ffn_hidden": 2, "ffn_out": 1, "head": 1}
SOURCE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # pass.h, SourceType
DTYPES = {"float32": "F32", "float16": "F16", "uint8": "U8"}
GROUPS_AT_ONCE = 256  # groups of columns that a thread packs in one task
ALIGNMENT = 4096  # of the first tensor
ALIGNED = 32  # of each: half a cache line, in which an adapter's rows of fp16 lie
# Limits of building: libraries, the weights before and after merging, and the file, which is mapped
# while it is written.
BUILD_MIB, BUILD_TIMES_FP32 = 512, 4
BUILD_CPU_S, BUILD_BYTES_PER_CPU_S = 60, 10 * MIB

logger = logging.getLogger(__name__)
File = TypeVar("File", bound="PreparedFile")


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: a packed matrix of n columns of k numbers, or n rows of k floats."""

    name: str
    source: str  # its name in an artifact
    n: int
    k: int
    block: int | None = None  # of a matrix

    @property
    def shape(self) -> tuple[int, ...]:
        groups, line = -(-self.n // library.LINE), library.LINE
        if self.block is None:
            return (self.n, -(-self.k // line) * line)
        if not self.block:
            return (groups, self.k, line)
        return (groups, library.packed_bytes(self.n, self.k, self.block) // groups)

    @property
    def dtype(self) -> str:
        return "U8" if self.block else "F32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (1 if self.block else 4)


def layout(config: GPT2Config, precision: str) -> Iterator[Entry]:
    """The tensors of a file, in order."""
    block, c = BLOCKS[precision], config

    def norm(name: str, source: str) -> Iterator[Entry]:
        for part in ("gamma", "beta"):
            yield Entry(f"{name}.{part}", f"{source}.{part}", 1, c.units)

    def matrix(name: str, source: str, n: int, k: int) -> Iterator[Entry]:
        yield Entry(f"{name}.weight", f"{source}.weight", n, k, block)
        yield Entry(f"{name}.bias", f"{source}.bias", 1, n)

    yield Entry("embedding.weight", names.EMBEDDING, c.vocab_size, c.units, block)
    if not c.tie_word_embeddings:
        yield Entry("head.weight", names.OUTPUT, c.vocab_size, c.units, block)
    yield Entry("positions", names.POSITIONS, c.max_length, c.units)
    for i in range(c.num_layers):
        at = f"layers.{i}"
        yield from norm(f"{at}.attention_norm", names.ATTENTION_NORM.format(i))
        yield from matrix(f"{at}.qkv", names.QKV.format(i), 3 * c.units, c.units)
        yield from matrix(f"{at}.attention_out", names.ATTENTION_OUT.format(i), c.units, c.units)
        yield from norm(f"{at}.ffn_norm", names.FFN_NORM.format(i))
        yield from matrix(f"{at}.ffn_hidden", names.FFN_HIDDEN.format(i), c.hidden_size, c.units)
        yield from matrix(f"{at}.ffn_out", names.FFN_OUT.format(i), c.units, c.hidden_size)
    yield from norm("final_norm", names.FINAL_NORM)


def num_bytes(config: GPT2Config, precision: str) -> int:
    """Bytes of a model's weights."""
    return sum(entry.num_bytes for entry in layout(config, precision))


class Stored(Protocol):
    """A tensor of a prepared file; `dtype` as safetensors calls it."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...


class PreparedFile:
    """A mapped file; `name in file` is whether it has the tensor."""

    def __init__(self, path: Path, entries: Iterable[Stored], content: str) -> None:
        """Map a file.

        Raises `ArtifactError` and `OSError` where it does not exist, is not whole, or has other
        tensors or those of another `content`.
        """
        index, metadata, data_begin = read_safetensors(path)
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(self._memory, np.uint8)
        self.num_bytes = len(data)
        self.span: Span = (data.ctypes.data, len(data))
        expected = {entry.name: entry for entry in entries}
        for name, tensor in index.items():
            entry = expected.pop(name, None)
            place = None if entry is None else (entry.dtype, entry.shape)
            if (DTYPES.get(tensor.dtype), tensor.shape) != place or tensor.offset % ALIGNED:
                raise ArtifactError(f"{path.name}: {name} is not of this model")
        if expected or metadata.get("source") != content:
            raise ArtifactError(f"{path.name} is not of this model")
        if is_older_than_boot(path):
            if metadata.get("blake3") != _digest(data[data_begin:]):
                raise ArtifactError(f"{path.name} is damaged")
            with suppress(OSError):  # another user's file: it is hashed again after the next start
                os.utime(path)
        self._addresses = {name: self.span[0] + tensor.offset for name, tensor in index.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._addresses

    def address(self, name: str) -> int:
        return self._addresses[name]

    def close(self) -> None:
        """Unmap the file; nothing may point into it any more."""
        self._addresses = {}
        self._memory.close()


class Prepared(PreparedFile):
    """The mapped file of a model."""

    def __init__(self, path: Path, config: GPT2Config, precision: str, content: str) -> None:
        """Map the file of a model. Raises what `PreparedFile` does."""
        super().__init__(path, layout(config, precision), content)
        self.config, self.block = config, BLOCKS[precision]


def _digest(data: NDArray[np.uint8]) -> str:
    return blake3(data.data, max_threads=blake3.AUTO).hexdigest()


def prepared(
    artifact: Artifact, precision: str, cache_dir: Path | None, run: Run = directly
) -> Prepared:
    """Open the artifact's prepared model, which `run` builds if it does not exist.

    Its place is `cache_dir`, or `.prepared` in the artifact's folder; one that came with the
    artifact is used there. Where neither can be written, the file is built in a temporary folder
    and exists while it is open. Raises `ArtifactError`, and `OutOfMemory`, also where no disk has
    space.
    """
    config, content = artifact.config, artifact.content or content_of(artifact)
    fp32 = artifact.fp32_bytes

    source: tuple[Any, ...] = (
        build,
        str(artifact.path),
        to_manifest(dataclasses.replace(artifact, content=content)),
    )
    if isinstance(artifact, Merged):
        base, adapter = artifact.base, artifact.adapter
        source = (build_merged, str(base.path), to_manifest(base), str(adapter.path))
        source += (adapter_to_manifest(adapter),)

    def build_at(file: Path) -> Any:
        return run(
            *source,
            str(file),
            precision,
            what=artifact.path.name,
            limits=Limits(
                memory_mib=BUILD_MIB + BUILD_TIMES_FP32 * fp32 // MIB,
                cpu_s=BUILD_CPU_S + fp32 // BUILD_BYTES_PER_CPU_S,
                write_mib=64 + BUILD_TIMES_FP32 * fp32 // MIB,
                niceness=NICENESS,
            ),
        )

    return open_prepared(
        artifact.path,
        file_name([content, precision, dataclasses.asdict(config)]),
        cache_dir,
        lambda file: Prepared(file, config, precision, content),
        build_at,
    )


def file_name(key: list[Any]) -> str:
    """The name of the prepared file for a key, a JSON value that identifies its content."""
    return f"{hash_of(json.dumps([FORMAT, *key]))}{MODEL}"


def open_prepared(
    path: Path,
    name: str,
    cache_dir: Path | None,
    open_file: Callable[[Path], File],
    build_at: Callable[[Path], Any],
) -> File:
    """Open the prepared file of the artifact in `path`; `build_at` builds it if it does not exist.

    `build_at` returns what is wrong with the folder, if anything. Places and errors as of
    `prepared`.
    """
    folder = cache_folder(path, cache_dir)
    if folder is None:
        logger.warning("%s: its prepared models are another user's", path)
    for place in dict.fromkeys((folder, cache_folder(path, None))):
        if place is None:
            continue
        with suppress(ArtifactError, OSError):
            prepared_file = open_file(place / name)
            with suppress(OSError):
                os.utime(place / name)  # when it was used last, see prune
            return prepared_file

    def build_in(folder: Path) -> File:
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder)
        began = time.monotonic()
        problem = build_at(folder / name)
        if problem is not None:
            raise OSError(problem)
        logger.info("prepared %s in %.2f s", path.name, time.monotonic() - began)
        try:
            return open_file(folder / name)
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
        raise OutOfMemory(f"no disk has space to prepare {path.name}") from error


# In the sandbox


def build(path: str, manifest: dict[str, Any], file: str, precision: str) -> str | None:
    """Write an artifact's prepared file; returns what is wrong with its folder, if anything."""
    artifact = from_manifest(Path(path), manifest)
    return put(Path(file), lambda file: write(artifact, file, precision))


def build_merged(
    base_path: str,
    base_manifest: dict[str, Any],
    path: str,
    manifest: dict[str, Any],
    file: str,
    precision: str,
) -> str | None:
    """As `build`, for a base with an adapter merged into its weights."""
    base = from_manifest(Path(base_path), base_manifest)
    merged = merge(base, adapter_from_manifest(Path(path), manifest))
    return put(Path(file), lambda file: write(merged, file, precision))


def put(target: Path, write_at: Callable[[Path], object]) -> str | None:
    """Write a file beside its place, then move it there; returns what is wrong, if anything."""
    try:
        with tempfile.TemporaryDirectory(prefix=BUILDING, dir=target.parent) as building:
            write_at(Path(building) / target.name)
            (Path(building) / target.name).replace(target)
    except OSError as error:
        return str(error)
    return None


def write(artifact: Artifact, file: Path, precision: str) -> None:
    """Quantize or pack an artifact's weights into a new file, on all cores. Raises `OSError`."""
    entries = list(layout(artifact.config, precision))
    write_file(file, entries, artifact.content, lambda data: _fill(artifact, entries, data))


def write_file(
    file: Path,
    entries: Sequence[Stored],
    content: str,
    fill: Callable[[NDArray[np.uint8]], object],
) -> None:
    """Write a prepared file, whose tensors `fill` writes in order. Raises `OSError`."""
    header: dict[str, Any] = {"__metadata__": {"source": content, "blake3": "0" * 64}}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.num_bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        at += entry.num_bytes
    length = len(json.dumps(header))
    begin = -(-(8 + length) // ALIGNMENT) * ALIGNMENT
    with file.open("w+b") as opened:
        # a full disk is an error here, no signal
        os.posix_fallocate(opened.fileno(), 0, begin + at)
        with mmap.mmap(opened.fileno(), begin + at) as memory:
            data = np.frombuffer(memory, np.uint8)
            fill(data[begin:])
            header["__metadata__"]["blake3"] = _digest(data[begin:])
            text = json.dumps(header).encode().ljust(begin - 8)
            data[:begin] = np.frombuffer((begin - 8).to_bytes(8, "little") + text, np.uint8)
            del data
    file.chmod(0o644)


def _fill(artifact: Artifact, entries: list[Entry], data: NDArray[np.uint8]) -> None:
    at = 0
    with ThreadPoolExecutor(cpu_count()) as pool:
        futures = []
        for entry in entries:
            weight = artifact.weights[entry.source]
            place = data[at : at + entry.num_bytes]
            at += entry.num_bytes
            if entry.block is None:
                rows = place.view(np.float32).reshape(entry.shape)
                rows[:, : entry.k] = weight
                continue
            groups = entry.shape[0]
            for first in range(0, groups, GROUPS_AT_ONCE):
                last = min(first + GROUPS_AT_ONCE, groups)
                futures.append(pool.submit(_pack, entry, weight, place, first, last))
        for future in futures:
            future.result()


def _pack(
    entry: Entry, weight: NDArray[Any], place: NDArray[np.uint8], first: int, last: int
) -> None:
    column, step = (stride // weight.itemsize for stride in weight.strides)
    library.pack(
        weight.ctypes.data,
        SOURCE_TYPES[weight.dtype.name],
        column,
        step,
        entry.n,
        entry.k,
        entry.block,
        first,
        last,
        place.ctypes.data,
    )
