"""Makes the files of a prepared model: a graph, and each of its large tensors in one of its own."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray

from engine.artifacts import EMBEDDING, POSITIONS, Artifact
from engine.backends import onnx_session
from engine.blobs import CHUNK_BYTES, Store
from engine.models.gpt2_onnx import GPT2Graph

PAGE = 4096
OWN_FILE_BYTES = 1 << 20


def build(artifact: Artifact, precision: str, store: Store) -> dict[str, Any]:
    """Quantizes, lets onnxruntime pack, and puts the files into the store.

    Returns what a loader has to know: the names of the graph and of the two fp32 tables, their
    shapes, and `weight_bytes`. Raises `OSError` where the disk has no room, and `OutOfMemory`.
    """
    graph = GPT2Graph(artifact.config, artifact.weights, precision)
    tables = {"embedding": artifact.weights[EMBEDDING], "positions": artifact.weights[POSITIONS]}
    weights_bytes = sum(tensor.nbytes for tensor in graph.external.values())
    # As given and packed, the largest of them once more while it moves; the tables come after.
    needed = 2.5 * weights_bytes + sum(4 * table.size for table in tables.values())
    if shutil.disk_usage(store.building).free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed in {store.building}")
    packed = store.building / "packed.onnx"
    weights_file = onnx_session.pack(graph.serialized, graph.external, packed)
    del graph
    model = onnx.load_model(packed, load_external_data=False)
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
    entry: dict[str, Any] = {
        "weight_bytes": sum(t.used_bytes for t in tensors),
        "read": [[t.entries["location"], *piece] for t in tensors for piece in t.used_pieces],
    }
    entry["graph"] = store.add([model.SerializeToString()], ".onnx")
    for kind, table in tables.items():
        entry[kind] = store.add(_chunks(table), ".bin")
        entry[f"{kind}_shape"] = table.shape
    return entry


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
    def used_pieces(self) -> list[tuple[int, int]]:
        """What computing reads: the packed copies where there are any."""
        return self.pieces[1:] or self.pieces

    @property
    def used_bytes(self) -> int:
        return sum(length for _, length in self.used_pieces)

    def place(self, location: str, offsets: list[int]) -> None:
        self.entries |= {"location": location, "offset": str(offsets[0])}
        for (key, packed), offset in zip(self._packed.items(), offsets[1:], strict=True):
            kernel, _, *rest = packed
            self.entries[key] = f"{kernel}|{';'.join([str(offset), *rest])}"
            packed[1] = str(offset)
        self.offset = offsets[0]
        del self.tensor.external_data[:]
        for key, value in self.entries.items():
            self.tensor.external_data.add(key=key, value=value)


def _move(source: BinaryIO, tensors: list[_External], store: Store) -> None:
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
