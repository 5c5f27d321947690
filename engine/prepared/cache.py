"""The on-disk cache of models prepared for onnxruntime: built once, then only mapped.

A cache folder is flat, and nothing in it is ever changed in place:

    <hash>.bin, <hash>.onnx       files named by their content: large tensors (each in a file of its
                                  own), a model's small ones, its embeddings; graphs
    <key>.json                    one prepared model: the files it consists of; written last
    <key>.frame.json              the frame that models of its shape are shown in (`onnx.frames`)
    <path hash>.source.json       what an artifact was found to hold (`engine.prepared.manifest`)

So what two models share byte for byte is stored once and shares its pages in memory; whoever
builds writes each file under another name and renames it, so several may build at once; and an
entry is complete or is not there. A file whose size or time is not what its entry says is checked
against its name (`engine.prepared.entries`). What is not noticed: bytes that changed on the disk
without changing the time.

Entries are not removed when their artifact changes or goes; `engine.prepared.prune` bounds a shared
cache. The folder may also be deleted, loaded models do not mind.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.artifacts.artifact import Artifact
from engine.backends.onnx.frames import FrameFiles, Piece
from engine.prepared.embeddings import Floats, Table, open_floats, open_table
from engine.prepared.entries import is_there, make_entry, read_entry
from engine.prepared.files import hash_of
from engine.prepared.folder import own_folder
from engine.prepared.frame import frame_name, make_frame, packer, read_frame, to_pieces
from engine.prepared.kept import kept, run_build
from engine.prepared.manifest import Run, content_of, directly, from_manifest

FORMAT = 7  # raise it when the graph or the quantization changes, or what an entry says


@dataclass(frozen=True)
class Prepared:
    """A model that only needs mapping."""

    frame: FrameFiles
    # (V, C), mapped; int8 where the weights are. None: it is the last of the pieces.
    embedding: Table | Floats | None
    positions: Floats  # (max_length, C), mapped
    weight_bytes: int  # of the graph's weights in memory once all have been used
    pieces: list[Piece]  # where those lie, in the order of the frame's windows


@contextmanager
def prepared(
    artifact: Artifact, precision: str, cache_dir: Path | None, run: Run = directly
) -> Iterator[Prepared]:
    """Finds the artifact in the cache or has `run` build it there, see `kept`."""
    key = _key(artifact, precision)

    def build_in(folder: Path) -> str | None:
        frames = str(own_folder() or folder)
        said: str | None = run_build(run, build, artifact, precision, str(folder), key, frames)
        return said

    with kept(artifact, key, cache_dir, _read, build_in) as found:
        yield found


def _key(artifact: Artifact, precision: str) -> str:
    parts = [
        FORMAT,
        artifact.content or content_of(artifact),
        dataclasses.asdict(artifact.config),
        precision,
        *packer(precision.startswith("int8")),
    ]
    return hash_of(json.dumps(parts, sort_keys=True))


# Reading an entry


def _read(path: Path) -> Prepared:
    """Raises one of `MALFORMED`."""
    folder, entry = path.parent, read_entry(path)
    pieces = to_pieces(folder, entry["pieces"])
    frame = read_frame(folder / entry["frame"])
    if frame.lengths != [length for _, _, length in pieces]:
        raise ValueError(path)
    table = entry["embedding"]
    embedding = None if table is None else open_table(folder, *table)
    positions = open_floats(folder, *entry["positions"])
    return Prepared(frame, embedding, positions, entry["weight_bytes"], pieces)


def build(
    path: str, manifest: dict[str, Any], precision: str, folder: str, key: str, frames: str
) -> str | None:
    """Builds the entry and its frame, what of them is not there, in the sandbox.

    Frames are built in the folder `frames`. Says what is wrong with a folder, if it is that.
    """
    # onnx takes 0.2 s to import and is not needed for what is prepared already.
    from engine.backends.onnx.graph import GPT2Graph
    from engine.prepared import build as packing

    target, artifact = Path(folder), from_manifest(Path(path), manifest)
    graph = GPT2Graph(artifact.config, artifact.weights, precision)
    try:
        name = frame_name(graph)
        frame = make_frame(graph, target / name, Path(frames) / name)
        if not is_there(entry := target / f"{key}.json", _read):
            found = read_frame(frame)
            make_entry(
                entry,
                lambda store: packing.build(artifact, graph, store, found) | {"frame": frame.name},
            )
    except OSError as error:
        return str(error)
    return None
