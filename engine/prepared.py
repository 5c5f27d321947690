"""The on-disk cache of models prepared for onnxruntime: built once, then only mapped.

A cache folder is flat, and nothing in it is ever changed in place:

    <sha256>.bin, <sha256>.onnx   files named by their content: a graph, its large tensors (each in
                                  a file of its own), its small ones, and the embeddings as fp32
    <key>.json                    one prepared model: the files it consists of; written last
    <path hash>.source.json       what was found in weight files of these sizes, times and inodes

So what two models share byte for byte is stored once and shares its pages in memory; whoever
builds writes each file under another name and renames it, so several may build at once; and an
entry is complete or is not there. A file whose size or time is not what its entry says is checked
against its name. What is not noticed: bytes that changed on the disk without changing the time.

Entries are not removed when their artifact changes or goes; `engine.prune` bounds a shared cache.
The folder may also be deleted, loaded models do not mind.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.artifacts import Artifact, Weights
from engine.backends import onnx_session
from engine.blobs import Store, is_whole, sha256
from engine.errors import OutOfMemory
from engine.memory import return_freed_memory
from engine.prune import in_use

FORMAT = 2  # raise it when the graph or the quantization changes
FOLDER = ".prepared"
BUILDING = ".building-"
ABANDONED_AFTER_S = 3600
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
    with ExitStack() as stack:
        stack.enter_context(in_use(folder))
        content = _content(artifact, folder)
        key = _key(artifact, precision, content)
        found = _read(folder, key)
        if found is None:
            try:
                found = _build(artifact, precision, folder, key)
            except OSError as error:
                logger.warning("cannot keep a prepared model in %s: %s", folder, error)
        if found is not None:
            with suppress(OSError):  # when it was used last
                os.utime(folder / f"{key}.json")
            yield found
            return
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
    return sha256(json.dumps(parts, sort_keys=True).encode())


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
    """The hash of the artifact's weights; read again only if a file was touched since."""
    paths = [file.resolve() for file in artifact.weight_files]
    stats = [path.stat() for path in paths]
    now = [
        [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
        for path, stat in zip(paths, stats, strict=True)
    ]
    index = folder / f"{sha256(str(paths[0]).encode())}.source.json"
    known = _read_json(index)
    if known.get("files") == now and isinstance(known.get("content"), str):
        return str(known["content"])
    content = _hash_weights(artifact.weights)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(index, {"files": now, "content": content})
    except OSError:
        logger.info("cannot write %s: the weights are hashed at every load", index)
    return content


def _hash_weights(weights: Weights) -> str:
    names = sorted(weights)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: sha256(_bytes(weights[name])), names)
        parts = [
            [name, weights[name].dtype.str, weights[name].shape, digest]
            for name, digest in zip(names, digests, strict=True)
        ]
    return sha256(json.dumps(parts).encode())


def _bytes(weight: NDArray[Any]) -> NDArray[np.uint8]:
    """Those of a contiguous array: hashlib knows no bfloat16."""
    return np.ascontiguousarray(weight).reshape(-1).view(np.uint8)


# Reading an entry


def _read(folder: Path, key: str) -> Prepared | None:
    path = folder / f"{key}.json"
    entry = _read_json(path)
    try:
        files: dict[str, list[int]] = entry["files"]
        changed = [name for name, stamp in files.items() if _stamp(folder / name) != stamp]
        if changed:
            with ThreadPoolExecutor(THREADS) as pool:
                whole = all(pool.map(lambda name: is_whole(folder / name), changed))
            if not whole:
                logger.warning("%s is damaged and is made anew", path)
                return None
            # A copied cache has other times: remember them, if we may.
            entry["files"] = {name: _stamp(folder / name) for name in files}
            with suppress(OSError):
                _write_json(path, entry)
        _read_ahead(folder, entry["read"])
        return Prepared(
            folder / entry["graph"],
            _map(folder / entry["embedding"], entry["embedding_shape"]),
            _map(folder / entry["positions"], entry["positions_shape"]),
            entry["weight_bytes"],
        )
    except (KeyError, TypeError, AttributeError, ValueError, OSError):
        return None  # not there, or not what this code writes


def _read_ahead(folder: Path, pieces: list[tuple[str, int, int]]) -> None:
    """Has the kernel begin to read what computing will need; page by page would be slower."""
    for name, offset, length in pieces:
        with open(folder / name, "rb") as file:
            os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


_mapped: weakref.WeakValueDictionary[str, Floats] = weakref.WeakValueDictionary()


def _map(path: Path, shape: list[int]) -> Floats:
    """Maps a file of floats; files of the same content are mapped once, wherever they are."""
    found = _mapped.get(path.name)
    if found is None or list(found.shape) != shape:
        found = np.memmap(path, dtype=np.float32, mode="r", shape=tuple(shape))
        _mapped[path.name] = found
    return found


def _build(artifact: Artifact, precision: str, folder: Path, key: str) -> Prepared:
    # onnx takes 0.2 s to import and is not needed for what is prepared already.
    from engine import packing

    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=folder) as building:
        store = Store(folder, Path(building))
        entry = packing.build(artifact, precision, store)
        entry["files"] = {name: _stamp(folder / name) for name in sorted(store.names)}
        _write_json(folder / f"{key}.json", entry)
    return_freed_memory()
    found = _read(folder, key)
    if found is None:
        raise OSError(f"{folder} does not keep what is written")
    return found


def _remove_abandoned(folder: Path) -> None:
    """Removes what a builder that was killed left behind."""
    for path in folder.glob(BUILDING + "*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=path.parent) as building:
        file = Path(building) / path.name
        file.write_text(json.dumps(value), encoding="utf-8")
        file.replace(path)
