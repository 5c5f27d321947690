"""Manifests: descriptions of artifacts, read once, by a sandbox in place of the engine.

A sandbox opens an artifact, checks it, reads all its weights, and answers with a manifest:
configuration, generation settings, and where each tensor is. It is stored in memory and as `<path
hash>.source.json` beside the prepared models, and is valid while the names, sizes, times and inodes
of the artifact's files are the same. The engine checks it again before it maps anything.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from common.memory import MIB
from engine.artifacts import adapter as adapters
from engine.artifacts.adapter import Adapter
from engine.artifacts.artifact import Artifact, MappedWeights, check_weights
from engine.artifacts.classifier import BIAS, WEIGHT, Classifier
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import readable
from engine.artifacts.generation_config import Generation
from engine.artifacts.open import open_artifact
from engine.artifacts.tensor_index import Tensor
from engine.prepared.folder import SOURCE, cache_folder, hash_of, read_object, written_whole
from engine.sandbox import Limits

FORMAT = 3
MAX_FILES = 1000
MAX_ARTIFACTS = 256  # in memory
THREADS = 2
CHUNK_NUMBERS = 1 << 18
# Limits of the sandbox that reads an artifact: fixed ones for parsing, and CPU time by file size.
READ_MIB = 512
READ_CPU_S = 20
READ_BYTES_PER_CPU_S = 25 * MIB
NICENESS = 5

logger = logging.getLogger(__name__)

Stamps = list[list[Any]]
Opened = TypeVar("Opened")  # a dataclass


class Run(Protocol):
    """Calls `target` and returns its value, perhaps in another process; all values are JSON.

    With a `file`, a descriptor for reading and writing it is one more argument.
    """

    def __call__(
        self, target: Any, *arguments: Any, what: str, limits: Limits, file: Path | None = None
    ) -> Any: ...


def directly(
    target: Any, *arguments: Any, what: str, limits: Limits, file: Path | None = None
) -> Any:
    """Call `target` in this process, for tools that read files of their own user."""
    if file is None:
        return target(*arguments)
    with file.open("r+b") as opened:
        return target(*arguments, opened.fileno())


class Manifests:
    """Opens artifacts, and reads each only once while its files do not change. Thread-safe."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._cache_dir = cache_dir
        self._known: OrderedDict[Path, tuple[Stamps, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path, run: Run = directly) -> Artifact:
        """Open an artifact and check that its weights are finite. Raises `ArtifactError`."""
        return self.open_as(path, run, Artifact, read, from_manifest)

    def open_adapter(self, path: Path, run: Run = directly) -> Adapter:
        """Open an adapter and check that its weights are finite. Raises `ArtifactError`."""
        return self.open_as(path, run, Adapter, read_adapter, adapter_from_manifest)

    def open_as(
        self,
        path: Path,
        run: Run,
        kind: type[Opened],
        target: Callable[[str], dict[str, Any]],
        decode: Callable[[Path, Any], Opened],
    ) -> Opened:
        """Open by a manifest: from memory, from disk, or made by `target` in a sandbox."""
        path = path.resolve()
        stamps = stamps_of(path)
        with self._lock:
            known = self._known.get(path)
        artifact: Any
        if known is not None and known[0] == stamps and isinstance(known[1], kind):
            artifact = known[1]
        else:
            stored = self._stored(path, stamps, decode)
            artifact = stored or decode(path, self._read(path, stamps, run, target))
        with self._lock:
            self._known[path] = (stamps, artifact)
            self._known.move_to_end(path)
            while len(self._known) > MAX_ARTIFACTS:
                self._known.popitem(last=False)
        copy: Opened = dataclasses.replace(artifact)  # mappings end with it
        return copy

    def _file(self, path: Path) -> Path | None:
        folder = cache_folder(path, self._cache_dir)
        return folder and folder / (hash_of(str(path)) + SOURCE)

    def _stored(self, path: Path, stamps: Stamps, decode: Callable[[Path, Any], Any]) -> Any:
        """Return the artifact of a stored manifest, or None if that is stale or damaged."""
        file = self._file(path)
        stored = {} if file is None else read_object(file)
        if stored.get("format") != FORMAT or stored.get("files") != stamps:
            return None
        try:
            return decode(path, stored.get("artifact"))
        except ArtifactError:
            return None

    def _read(
        self, path: Path, stamps: Stamps, run: Run, target: Callable[[str], dict[str, Any]]
    ) -> dict[str, Any]:
        limits = Limits(
            memory_mib=READ_MIB,
            cpu_s=READ_CPU_S + sum(size for _, size, *_ in stamps) // READ_BYTES_PER_CPU_S,
            niceness=NICENESS,
        )
        began = time.monotonic()
        manifest: dict[str, Any] = run(target, str(path), what="the model", limits=limits)
        logger.info("read %s in %.2f s", path.name, time.monotonic() - began)
        file = self._file(path)
        if file is not None and stamps_of(path) == stamps:
            entry = {"format": FORMAT, "path": str(path), "files": stamps, "artifact": manifest}
            with suppress(OSError):  # the artifact is then read again after a restart
                file.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(file) as new:
                    new.write_text(json.dumps(entry), "utf-8")
        return manifest


def stamps_of(path: Path) -> Stamps:
    """Return name, size, time and inode of the files in a folder. Raises `ArtifactError`."""
    stamps: Stamps = []
    missing = (FileNotFoundError, NotADirectoryError)
    try:
        with readable("the model's folder", but=missing), os.scandir(path) as entries:
            for entry in entries:
                if len(stamps) == MAX_FILES:
                    raise ArtifactError(f"the folder holds more than {MAX_FILES} files")
                status = entry.stat(follow_symlinks=os.path.exists(entry.path))
                if not stat.S_ISDIR(status.st_mode):
                    stamps.append([entry.name, status.st_size, status.st_mtime_ns, status.st_ino])
    except missing:
        raise ArtifactError("there is no such model folder") from None
    return sorted(stamps)


# The functions below run in the sandbox.


def read(path: str) -> dict[str, Any]:
    """Read the artifact in `path`; return its manifest. Raises `ArtifactError`."""
    artifact = open_artifact(path)
    return to_manifest(dataclasses.replace(artifact, content=content_of(artifact)))


def read_adapter(path: str) -> dict[str, Any]:
    """Read the adapter in `path`; return its manifest. Raises `ArtifactError`."""
    adapter = adapters.read(path)
    return to_manifest(dataclasses.replace(adapter, content=content_of(adapter)))


def content_of(artifact: MappedWeights) -> str:
    """Read all weights and return their hash. Raises `ArtifactError` for NaN or infinity."""
    file_bytes = sum(file.stat().st_size for file in artifact.weight_files)
    if sum(tensor.nbytes for tensor in artifact.index.values()) > file_bytes:
        raise ArtifactError(f"{artifact.weight_files[0].name}: its tensors overlap")
    weights, names = artifact.weights, sorted(artifact.index)

    def hash_tensor(name: str) -> str:
        try:
            return hash_of(_finite_chunks(weights[name]))
        except FloatingPointError:
            file = artifact.index[name].file
            raise ArtifactError(f"{file}: {name} holds NaN or infinity") from None

    with ThreadPoolExecutor(THREADS) as pool:
        parts = [
            [name, weights[name].dtype.str, weights[name].shape, digest]
            for name, digest in zip(names, pool.map(hash_tensor, names), strict=True)
        ]
    return hash_of(json.dumps(parts))


def _finite_chunks(weight: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a tensor in chunks, of float64 those of float32, as it is computed in.

    Raises `FloatingPointError` for NaN and infinity.
    """
    rows = max(CHUNK_NUMBERS // max(weight[:1].size, 1), 1)
    for begin in range(0, len(weight), rows):
        piece = np.ascontiguousarray(weight[begin : begin + rows])
        if piece.dtype == np.float64:
            with np.errstate(over="ignore"):
                piece = piece.astype(np.float32)
        if not np.isfinite(piece).all():
            raise FloatingPointError
        yield piece.reshape(-1).view(np.uint8)


def to_manifest(artifact: Artifact | Adapter) -> dict[str, Any]:
    """Return the manifest of an artifact or adapter, as values for JSON."""
    shared: dict[str, Any] = {
        "index": {name: list(tensor) for name, tensor in artifact.index.items()},
        "generation": artifact.generation.to_json(),
        "content": artifact.content,
    }
    if artifact.classifier is not None:
        shared["classifier"] = artifact.classifier.to_json()
    if isinstance(artifact, Adapter):
        scales, tokens = dict(artifact.scales), dict(artifact.tokens)
        return {**shared, "base": artifact.base, "scales": scales, "tokens": tokens}
    config, file = dataclasses.asdict(artifact.config), artifact.tokenizer_file.name
    return {**shared, "config": config, "tokenizer": file}


# The functions below run in the engine.


def from_manifest(path: Path, value: Any) -> Artifact:
    """Make an artifact of a manifest, checked against the files. Raises `ArtifactError`."""
    try:
        config = config_of(value["config"])
        index = index_of(path, value["index"])
        classifier, head = _classifier(value, index)
        if classifier is not None:
            classifier.check_head(head, config.units, "the model")
        check_weights(index, config, "the model")
        index |= head
        tokenizer_file = file_in(path, value["tokenizer"])
        generation, content = Generation.from_json(value["generation"]), str(value["content"])
        return Artifact(path, config, index, tokenizer_file, generation, content, classifier)
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        raise ArtifactError("the model changed while it was read") from None


def config_of(fields: Any) -> GPT2Config:
    """Return a checked configuration. Raises `TypeError`, `ValueError`."""
    config = GPT2Config(**fields)
    for name, kind in get_type_hints(GPT2Config).items():
        size = getattr(config, name)
        if type(size) is not kind or (kind is int and size < 1):
            raise ValueError(name)
    if config.units % config.num_heads:
        raise ValueError("num_heads")
    return config


def file_in(folder: Path, name: Any) -> Path:
    """Return the path of a file by its name. Raises `ValueError` for a path in place of a name."""
    return folder / _plain_name(name)


def _classifier(
    value: Any, index: dict[str, Tensor]
) -> tuple[Classifier | None, dict[str, Tensor]]:
    """Return a manifest's classifier and its head's tensors, which are removed from the index."""
    head = {name: index.pop(name) for name in (WEIGHT, BIAS) if name in index}
    if "classifier" not in value:
        return None, {}
    classifier = Classifier.from_json(value["classifier"])
    classifier.check_head(head, head[WEIGHT].shape[-1], "the model")
    return classifier, head


def adapter_from_manifest(path: Path, value: Any) -> Adapter:
    """Make an adapter of a manifest, checked against the files. Raises `ArtifactError`."""
    try:
        index = index_of(path, value["index"])
        classifier, head = _classifier(value, index)
        scales = {str(module): float(scale) for module, scale in value["scales"].items()}
        for module, product in (module.split(".") for module in scales):
            if not module.isdecimal() or product not in adapters.BASE_NAMES:
                raise ValueError(product)
        parts = {n.rpartition(".")[0] for n in index if not n.startswith(adapters.WHOLE)}
        if parts != set(scales) or not all(map(np.isfinite, scales.values())):
            raise ValueError("scales")
        for module in scales:
            if (index[f"{module}.down"].ndim, index[f"{module}.up"].ndim) != (2, 2):
                raise ValueError(module)
        tokens = {str(name): [int(i) for i in ids] for name, ids in value["tokens"].items()}
        rows = {n[1:].removesuffix(adapters.ROWS) for n in index if n.endswith(adapters.ROWS)}
        if rows != {name for name, ids in tokens.items() if ids and min(ids) >= 0}:
            raise ValueError("tokens")
        generation = Generation.from_json(value["generation"])
        base, content = str(value["base"]), str(value["content"])
        index |= head
        return Adapter(path, base, index, scales, tokens, generation, content, classifier)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):
        raise ArtifactError("the adapter changed while it was read") from None


def index_of(path: Path, value: Any) -> dict[str, Tensor]:
    """Return a manifest's index, checked against the files in `path`."""
    index = {
        str(name): Tensor(_plain_name(file), offset, dtype, tuple(shape), tuple(strides))
        for name, (file, offset, dtype, shape, strides) in value.items()
    }
    sizes = {file: (path / file).stat().st_size for file in {t.file for t in index.values()}}
    for name, tensor in index.items():
        tensor.check(name, sizes[tensor.file])
    return index


def _plain_name(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise ValueError(name)
    return name
