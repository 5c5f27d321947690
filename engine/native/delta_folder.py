"""Deltas as artifacts: `delta.safetensors` in place of a fine-tune's weights.

The file is a prepared file of `engine.native.delta`, so it is of one base's content and of one
format of int8; a classifier's has its head behind that, in fp32. The engine maps a checked copy of
it, which is among the prepared models.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from common.memory import MIB
from common.model_files import DELTA
from engine.artifacts.artifact import CONFIG_FILE, Artifact
from engine.artifacts.classifier import BIAS, WEIGHT, Classifier
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import map_file, parse_json, read_json
from engine.artifacts.generation_config import Generation, read_generation, read_generation_config
from engine.artifacts.hugging_face import TOKENIZER_FILE
from engine.artifacts.read_safetensors import read_safetensors
from engine.artifacts.tensor_index import Index, map_index
from engine.artifacts.v1 import only_file
from engine.native import library, prepared
from engine.native.delta import VERSION, Delta, check_shape, choices_of, layout, matrices
from engine.native.prepared import Stored, open_prepared, write_arrays
from engine.prepared import manifest as manifests
from engine.prepared.manifest import Manifests, Run, config_of, directly, file_in
from engine.sandbox import Limits

METADATA = ("source", "format", "config", "choices", "more", "blake3")
LABELS = "classifier"  # in the metadata of a classifier's: what its outputs mean
AGAIN = "make it again: ./kogpt2 convert FINE-TUNE FOLDER --to delta --base BASE"
BUILD_MIB, BUILD_CPU_S = 512, 60


@dataclass(frozen=True)
class DeltaFolder:
    """A checked folder with a delta.

    described: the fine-tune without weights but a classifier's head: configuration, tokenizer,
        generation settings
    metadata: of the delta's file
    num_bytes: of the file
    """

    described: Artifact
    metadata: Mapping[str, str]
    num_bytes: int

    def open(self, base: Artifact, cache_dir: Path | None = None, run: Run = directly) -> Delta:
        """Map a copy of the delta, which `run` makes if needed.

        Raises `ArtifactError`, also for another base, and as `engine.native.prepared.prepared`.
        """
        whole = self.described
        content = base.content or manifests.content_of(base)
        if self.metadata["source"].rpartition(" ")[2] != content:
            raise ArtifactError(
                f"{DELTA} was not made with this base, or that has other weights by now: name the"
                f" one that it was made with (base), or {AGAIN}"
            )
        check_shape(whole.config, base)
        more = more_of(self.metadata, whole.config)
        if more != whole.config.vocab_size - base.config.vocab_size:
            raise ArtifactError(f"{DELTA} was made with a base of another vocabulary: {AGAIN}")
        entries = list(layout(whole.config, choices_of(self.metadata), more))
        limits = Limits(
            memory_mib=BUILD_MIB + 3 * self.num_bytes // MIB,
            cpu_s=BUILD_CPU_S,
            niceness=manifests.NICENESS,
        )
        metadata = dict(self.metadata)
        file = open_prepared(
            whole.path,
            ["delta of a folder", metadata],
            lambda _: entries,
            entries,
            metadata["source"],
            cache_dir,
            functools.partial(
                run, build, str(whole.path), metadata, what="the delta", limits=limits
            ),
        )
        return Delta(whole, base, file)


def open_folder(manifests: Manifests, path: Path, run: Run = directly) -> DeltaFolder:
    """Open a folder with a delta, and check its numbers. Raises `ArtifactError`."""
    return manifests.open_as(path, run, DeltaFolder, read, _from_manifest)


def read_folder(path: Path) -> DeltaFolder:
    """Read a folder with a delta in this process. Raises `ArtifactError`."""
    return _from_manifest(path, read(str(path)))


def _from_manifest(path: Path, value: Any) -> DeltaFolder:
    """Make a `DeltaFolder` of a manifest. Raises `ArtifactError`."""
    try:
        metadata = {name: str(value["metadata"][name]) for name in METADATA}
        config, generation = config_of(value["config"]), Generation.from_json(value["generation"])
        tokenizer = file_in(path, value["tokenizer"])
        head, labels = manifests.index_of(path, value["head"]), value[LABELS]
        classifier = None if labels is None else Classifier.from_json(labels)
        if classifier is not None:
            classifier.check_head(head, config.units, DELTA)
        source = metadata["source"]
        whole = Artifact(path, config, head, tokenizer, generation, source, classifier)
        return DeltaFolder(whole, metadata, int(value["num_bytes"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):
        raise ArtifactError("the delta changed while it was read") from None


# In the sandbox


def read(path: str) -> dict[str, Any]:
    """Read the delta in a folder; return its manifest. Raises `ArtifactError`."""
    folder = Path(path)
    content = _read_file(folder / DELTA)
    generation, tokenizer = read_generation(folder), folder / TOKENIZER_FILE
    if tokenizer.is_file():
        fields = read_json(folder / CONFIG_FILE)
        generation = generation.over(read_generation_config(folder, fields))
    else:
        tokenizer = only_file(folder, "*.spiece")
    return {
        "config": asdict(content.config),
        "metadata": content.metadata,
        LABELS: content.classifier and content.classifier.to_json(),
        "head": {name: list(tensor) for name, tensor in content.head.items()},
        "generation": generation.to_json(),
        "tokenizer": tokenizer.name,
        "num_bytes": (folder / DELTA).stat().st_size,
    }


def build(path: str, metadata: dict[str, str], file: int) -> int:
    """Copy the delta in a folder into a prepared file; returns its bytes."""
    config, present, _, _, arrays = _read_file(Path(path) / DELTA)
    if present != metadata:
        raise ArtifactError("the delta changed while it was read")
    entries = list(layout(config, choices_of(metadata), more_of(metadata, config)))
    return write_arrays(file, entries, metadata, arrays)


def more_of(metadata: Mapping[str, str], config: GPT2Config) -> int:
    """Return how many tokens a delta has that its base does not have. Raises `ArtifactError`."""
    given = metadata["more"]
    more = int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else -1
    if not 0 <= more < config.vocab_size:
        raise ArtifactError(f"{DELTA} has {given[:100]} more tokens than its base: {AGAIN}")
    return more


class Content(NamedTuple):
    """A checked file of a delta; `head`: the tensors of a classifier's."""

    config: GPT2Config
    metadata: dict[str, str]
    classifier: Classifier | None
    head: Index
    arrays: Mapping[str, NDArray[Any]]


def _read_file(path: Path) -> Content:
    """Read and check a file. Raises `ArtifactError`."""
    try:
        index, given, begin = read_safetensors(path)
    except FileNotFoundError:
        raise ArtifactError(f"the folder holds no {DELTA}") from None
    if given.get("format") != VERSION:
        raise ArtifactError(
            f"{DELTA} has the format {str(given.get('format'))[:100]} instead of {VERSION}: {AGAIN}"
        )
    metadata = {name: given[name] for name in METADATA if isinstance(given.get(name), str)}
    if len(metadata) < len(METADATA):
        raise ArtifactError(f"{DELTA} lacks some of its metadata, {', '.join(METADATA)}: {AGAIN}")
    try:
        config = config_of(parse_json(metadata["config"].encode(), f"{DELTA}'s config"))
    except (TypeError, ValueError, AttributeError):
        raise ArtifactError(f"{DELTA} has no configuration of a GPT-2: {AGAIN}") from None
    if config.num_layers > len(index):  # the layout of any number of layers has no end
        raise ArtifactError(f"{DELTA} has {len(index)} tensors for {config.num_layers} layers")
    choices, more = choices_of(metadata), more_of(metadata, config)
    if choices.keys() != matrices(config).keys():
        raise ArtifactError(f"{DELTA} has ranks and bits of other matrices: {AGAIN}")
    classifier, head = _head(given, index, config.units)
    expected = {entry.name: entry for entry in layout(config, choices, more)}
    for name, entry in expected.items():
        tensor = index.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (entry.type, entry.shape):
            raise ArtifactError(f"{DELTA}: {name} is not as its configuration says: {AGAIN}")
    if other := min(index.keys() - expected.keys() - head.keys(), default=None):
        raise ArtifactError(f"{DELTA} holds {other}, which is no part of a delta")
    arrays = map_index(path.parent, index)
    if prepared.digest(map_file(path)[begin:]) != metadata["blake3"]:
        raise ArtifactError(f"{DELTA} is damaged: its data have another checksum")
    for entry in expected.values():
        if not _is_finite(entry, arrays[entry.name]):
            raise ArtifactError(f"{DELTA}: {entry.name} holds NaN or infinity")
    for name in head:
        if not np.isfinite(arrays[name]).all():
            raise ArtifactError(f"{DELTA}: {name} holds NaN or infinity")
    return Content(config, metadata, classifier, head, arrays)


def _head(given: Mapping[str, Any], index: Index, units: int) -> tuple[Classifier | None, Index]:
    """Return what a classifier's outputs mean, and the tensors of its head."""
    if LABELS not in given:
        return None, {}
    try:
        labels = Classifier.from_json(parse_json(str(given[LABELS]).encode(), f"{DELTA}'s labels"))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ArtifactError(f"{DELTA} does not say what its labels are: {AGAIN}") from None
    head = {name: index[name] for name in (WEIGHT, BIAS) if name in index}
    labels.check_head(head, units, DELTA)
    return labels, head


def _is_finite(entry: Stored, array: NDArray[Any]) -> bool:
    """Return whether a tensor's numbers are, of a rest its scales, see product.h."""
    if entry.dtype == "U8":
        scales = array[:, -4 * library.LINE :]
        array = np.ascontiguousarray(scales).view(np.float32)
    return bool(np.isfinite(array).all())
