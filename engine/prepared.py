"""The on-disk cache of models prepared for onnxruntime: built once, then only mapped.

A cache folder is flat, and nothing in it is ever changed in place:

    <sha256>.bin, <sha256>.onnx   files named by their content: a graph, its large tensors (each in
                                  a file of its own), its small ones, and the embeddings as fp32
    <key>.json                    one prepared model: the files it consists of; written last
    <path hash>.source.json       what was found in a `.params` file of this size, time and inode

So what two models share byte for byte is stored once and shares its pages in memory; whoever
builds writes each file under another name and renames it, so several may build at once; and an
entry is complete or is not there. A file whose size or time is not what its entry says is checked
against its name. What is not noticed: bytes that changed on the disk without changing the time.

Entries are not removed when their artifact changes or goes: delete the folder, loaded models do
not mind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.artifacts import EMBEDDING, POSITIONS, Artifact, Weights
from engine.backends import onnx_session
from engine.errors import OutOfMemory

FORMAT = 1  # raise it when the graph or the quantization changes
FOLDER = ".prepared"
PAGE = 4096
OWN_FILE_BYTES = 1 << 20
BUILDING = ".building-"
ABANDONED_AFTER_S = 3600
CHUNK_BYTES = 1 << 20
THREADS = 2

logger = logging.getLogger(__name__)
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Prepared:
    """A model that only needs mapping."""

    graph: Path
    embedding: Floats  # (V, C), mapped
    positions: Floats  # (max_length, C), mapped
    weight_bytes: int  # of the graph's weights in memory once all have been used


@contextmanager
def prepared(artifact: Artifact, precision: str, cache_dir: Path | None) -> Iterator[Prepared]:
    """Finds the artifact in the cache or builds it there.

    The cache is `cache_dir` or `.prepared` in the artifact's folder. Where it cannot be written,
    the model is built in a temporary folder, which is gone after the `with` (an open session and
    the mapped arrays remain usable). Raises `OutOfMemory`, also where no disk has room.
    """
    folder = cache_dir or artifact.path / FOLDER
    content = _content(artifact, folder)
    key = _key(artifact, precision, content)
    found = _read(folder, key)
    if found is None:
        try:
            found = _build(artifact, precision, folder, key)
        except OSError as error:
            logger.warning("cannot keep a prepared model in %s: %s", folder, error)
    if found is not None:
        yield found
        return
    with ExitStack() as stack:
        try:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="prepared-"))
            found = _build(artifact, precision, Path(temporary), key)
        except OSError as error:
            raise OutOfMemory(f"no disk has room to prepare {artifact.path.name}") from error
        yield found


def _key(artifact: Artifact, precision: str, content: str) -> str:
    parts = [
        FORMAT,
        content,
        dataclasses.asdict(artifact.config),
        precision,
        onnx_session.VERSION,
        _cpu_model(),
    ]
    return _sha256(json.dumps(parts, sort_keys=True).encode())


def _cpu_model() -> str:
    """What decides which kernels onnxruntime chooses: the processor and its instruction sets."""
    wanted = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}
    wanted |= {"CPU implementer", "CPU part", "Features"}  # as ARM says it
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return ""
    return "\n".join(s for s in first.splitlines() if s.partition(":")[0].strip() in wanted)


# What an artifact contains


def _content(artifact: Artifact, folder: Path) -> str:
    """The hash of the artifact's weights; read again only if the file was touched since."""
    path = artifact.params_file.resolve()
    stat = path.stat()
    now = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    index = folder / f"{_sha256(str(path).encode())}.source.json"
    known = _read_json(index)
    if known.get("file") == now and isinstance(known.get("content"), str):
        return str(known["content"])
    content = _hash_weights(artifact.weights)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(index, {"file": now, "content": content})
    except OSError:
        logger.info("cannot write %s: the weights are hashed at every load", index)
    return content


def _hash_weights(weights: Weights) -> str:
    names = sorted(weights)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: _sha256(np.ascontiguousarray(weights[name])), names)
        parts = [
            [name, weights[name].dtype.str, weights[name].shape, digest]
            for name, digest in zip(names, digests, strict=True)
        ]
    return _sha256(json.dumps(parts).encode())


# Reading an entry


def _read(folder: Path, key: str) -> Prepared | None:
    path = folder / f"{key}.json"
    entry = _read_json(path)
    try:
        files: dict[str, list[int]] = entry["files"]
        changed = [name for name, stamp in files.items() if _stamp(folder / name) != stamp]
        if changed:
            with ThreadPoolExecutor(THREADS) as pool:
                whole = all(pool.map(lambda name: _is_whole(folder / name), changed))
            if not whole:
                logger.warning("%s is damaged and is made anew", path)
                return None
            # A copied cache has other times: remember them, if we may.
            entry["files"] = {name: _stamp(folder / name) for name in files}
            with suppress(OSError):
                _write_json(path, entry)
        return Prepared(
            folder / entry["graph"],
            _map(folder / entry["embedding"], entry["embedding_shape"]),
            _map(folder / entry["positions"], entry["positions_shape"]),
            entry["weight_bytes"],
        )
    except (KeyError, TypeError, AttributeError, ValueError, OSError):
        return None  # not there, or not what this code writes


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _is_whole(path: Path) -> bool:
    return _hash_file(path) == path.stem


_mapped: weakref.WeakValueDictionary[str, Floats] = weakref.WeakValueDictionary()


def _map(path: Path, shape: list[int]) -> Floats:
    """Maps a file of floats; files of the same content are mapped once, wherever they are."""
    found = _mapped.get(path.name)
    if found is None or list(found.shape) != shape:
        found = np.memmap(path, dtype=np.float32, mode="r", shape=tuple(shape))
        _mapped[path.name] = found
    return found


# Building an entry


def _build(artifact: Artifact, precision: str, folder: Path, key: str) -> Prepared:
    # onnx takes 0.2 s to import and is not needed for what is prepared already.
    from engine.models.gpt2_onnx import GPT2Graph

    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=folder) as building:
        store = _Store(folder, Path(building))
        graph = GPT2Graph(artifact.config, artifact.weights, precision)
        packed = Path(building) / "packed.onnx"
        weights_file = onnx_session.pack(graph.serialized, graph.external, packed)
        del graph
        entry = _cut(packed, weights_file, store)
        for kind, name in (("embedding", EMBEDDING), ("positions", POSITIONS)):
            table = artifact.weights[name]
            entry[kind] = store.add(_chunks(table), ".bin")
            entry[f"{kind}_shape"] = table.shape
        entry["files"] = {name: _stamp(folder / name) for name in sorted(store.names)}
        _write_json(folder / f"{key}.json", entry)
    onnx_session.release_memory()
    found = _read(folder, key)
    if found is None:
        raise OSError(f"{folder} does not keep what is written")
    return found


def _cut(graph_file: Path, weights_file: Path, store: _Store) -> dict[str, Any]:
    """Moves each large tensor of a packed graph into a file of its own; returns the entry."""
    import onnx

    model = onnx.load_model(graph_file, load_external_data=False)
    tensors = [_External(t) for t in model.graph.initializer if t.external_data]
    with weights_file.open("r+b") as source:
        small = [t for t in tensors if t.stored_bytes < OWN_FILE_BYTES]
        large = [t for t in tensors if t.stored_bytes >= OWN_FILE_BYTES]
        if small:
            _move(source, small, store)
        # From the end, cutting off what was moved: the disk holds the weights once, not twice.
        for tensor in sorted(large, key=lambda t: t.offset, reverse=True):
            end = tensor.offset
            _move(source, [tensor], store)
            source.truncate(end)
    graph = store.add([model.SerializeToString()], ".onnx")
    return {"graph": graph, "weight_bytes": sum(t.used_bytes for t in tensors)}


class _External:
    """Where a tensor of a packed graph lies: itself and its `prepacked_N` copies.

    onnxruntime writes both into the protobuf's `external_data`: `offset` and `length`, and
    `prepacked_0` = `kernel|offset;length;checksum`.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.entries = {entry.key: entry.value for entry in tensor.external_data}
        self.offset = int(self.entries["offset"])
        self._packed = {}
        for key, value in self.entries.items():
            if key.startswith("prepacked_"):
                kernel, _, place = value.rpartition("|")
                self._packed[key] = [kernel, *place.split(";")]

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(offset, length) of the tensor and of each packed copy."""
        own = (self.offset, int(self.entries["length"]))
        return [own, *((int(p[1]), int(p[2])) for p in self._packed.values())]

    @property
    def stored_bytes(self) -> int:
        return sum(length for _, length in self.pieces)

    @property
    def used_bytes(self) -> int:
        """Bytes that computing reads: the packed copies where there are any."""
        return sum(length for _, length in self.pieces[1:] or self.pieces)

    def place(self, location: str, offsets: list[int]) -> None:
        self.entries |= {"location": location, "offset": str(offsets[0])}
        for (key, packed), offset in zip(self._packed.items(), offsets[1:], strict=True):
            kernel, _, *rest = packed
            self.entries[key] = f"{kernel}|{';'.join([str(offset), *rest])}"
        del self.tensor.external_data[:]
        for key, value in self.entries.items():
            self.tensor.external_data.add(key=key, value=value)


def _move(source: BinaryIO, tensors: list[_External], store: _Store) -> None:
    """Copies tensors into one file of the store, each piece at the start of a page."""
    at = 0
    offsets: list[list[int]] = []
    for tensor in tensors:
        offsets.append([])
        for _, length in tensor.pieces:
            offsets[-1].append(at)
            at += -(-length // PAGE) * PAGE

    def chunks() -> Iterator[bytes]:
        for offset, length in (piece for tensor in tensors for piece in tensor.pieces):
            source.seek(offset)
            for begin in range(0, length, CHUNK_BYTES):
                wanted = min(CHUNK_BYTES, length - begin)
                chunk = source.read(wanted)
                if len(chunk) != wanted:
                    raise OSError(f"{source.name} was not written to its end")
                yield chunk
            yield bytes(-length % PAGE)

    name = store.add(chunks(), ".bin")
    for tensor, at_offsets in zip(tensors, offsets, strict=True):
        tensor.place(name, at_offsets)


def _chunks(table: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of a matrix as fp32."""
    for begin in range(0, len(table), 1024):
        piece = np.ascontiguousarray(table[begin : begin + 1024], dtype=np.float32)
        yield piece.reshape(-1).view(np.uint8).data


class _Store:
    """Files named by the hash of what is in them."""

    def __init__(self, folder: Path, building: Path) -> None:
        self._folder, self._building = folder, building
        self.names: set[str] = set()

    def add(self, chunks: Iterable[bytes | memoryview], suffix: str) -> str:
        """Writes a file and returns its name; a whole one that is there already is kept."""
        digest = hashlib.sha256()
        temporary = self._building / "file"
        with temporary.open("wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        path = self._folder / (digest.hexdigest() + suffix)
        if path.exists() and _is_whole(path):
            temporary.unlink()
        else:
            temporary.replace(path)
        self.names.add(path.name)
        return path.name


def _remove_abandoned(folder: Path) -> None:
    """Removes what a builder that was killed left behind."""
    for path in folder.glob(BUILDING + "*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(path)


# Small things


def _sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=BUILDING, delete=False
    ) as file:
        json.dump(value, file)
    Path(file.name).replace(path)
