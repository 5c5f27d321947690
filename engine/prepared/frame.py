"""The frames that prepared models are shown in (`engine.backends.onnx.frames`), on the disk.

Each is an entry of its own. It depends on the shape of a model only; in fp32 on the processor and
on onnxruntime as well.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import onnx_session
from engine.artifacts.artifact import shapes
from engine.artifacts.config import GPT2Config
from engine.backends.onnx.frames import FrameFiles, Piece
from engine.prepared.entries import is_there, make_entry, read_entry
from engine.prepared.files import Store, hash_of
from engine.prepared.folder import FRAME

FORMAT = 6  # raise it when the graph changes, or what a frame says


def read_frame(path: Path) -> FrameFiles:
    """Raises one of `MALFORMED`."""
    folder, entry = path.parent, read_entry(path)
    windows = to_pieces(folder, entry["windows"])
    return FrameFiles(
        path.name,
        folder / entry["graph"],
        windows,
        [(name, num_bytes) for name, num_bytes in entry["matrices"]],
        entry["plain"],
        entry["plain_bytes"],
        entry["hides"],
    )


def to_pieces(folder: Path, said: list[Any]) -> list[Piece]:
    return [(folder / name, offset, length) for name, offset, length in said]


def build_frame(config: dict[str, Any], precision: str, folders: list[str]) -> str:
    """The frame for models of a shape in the first of the folders that has it; in the last it is
    built, in the sandbox."""
    from engine.backends.onnx.graph import GPT2Graph

    sizes = GPT2Config(**config)
    blank = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes(sizes)}
    graph = GPT2Graph(sizes, blank, precision)
    paths = [Path(folder) / frame_name(graph) for folder in folders]
    found = (path for path in paths if is_there(path, read_frame))
    return str(next(found, None) or make_frame(graph, paths[-1]))


def frame_name(graph: Any) -> str:
    said = graph.model.SerializeToString().hex()
    parts = [FORMAT, said, *packer(graph.quantized)]
    return f"{hash_of(json.dumps(parts))}{FRAME}"


def make_frame(graph: Any, path: Path, source: Path | None = None) -> Path:
    """Makes a graph's frame where it is not, a copy of `source` if given."""
    from engine.prepared import build as packing

    if not is_there(path, read_frame):
        if source in (None, path):
            make = partial(packing.build_frame, graph)
        else:
            make = partial(_copied, make_frame(graph, source))
        make_entry(path, make)
    return path


def _copied(path: Path, store: Store) -> dict[str, Any]:
    entry = read_entry(path)
    for name in entry["files"]:
        store.copy(path.parent / name)
    return {key: value for key, value in entry.items() if key not in ("files", "said")}


def packer(quantized: bool) -> list[str]:
    """Who has packed a model's matrices: those in int8 are the same everywhere."""
    return [] if quantized else [onnx_session.VERSION, cpu_model()]


def cpu_model() -> str:
    """What decides which kernels onnxruntime chooses: the processor and its instruction sets."""
    wanted = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}
    wanted |= {"CPU implementer", "CPU part", "Features"}  # as ARM says it
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return ""
    return "\n".join(s for s in first.splitlines() if s.partition(":")[0].strip() in wanted)
