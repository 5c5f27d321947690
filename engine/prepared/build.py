"""Makes the files of prepared models and of the frames that they are shown in.

An int8 matrix is written as our operator reads it. One of floats onnxruntime packs for this CPU, in
a session of its operator alone: so all cores work, a matrix is on the disk twice for a moment only,
and what is kept is what computing reads.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray

from common import onnx_session
from common.cpus import cpu_count
from engine.artifacts.artifact import EMBEDDING, POSITIONS, Artifact
from engine.backends.onnx import quantize
from engine.backends.onnx.frames import FrameFiles
from engine.backends.onnx.graph import GPT2Graph, Part, only, place_externally
from engine.prepared import embeddings
from engine.prepared.files import CHUNK_BYTES, OWN_FILE_BYTES, ZEROS, Store

PAGE = 4096
ALIGNMENT = 64  # onnxruntime's

Place = tuple[str, int, int]  # file, offset, length


def build(artifact: Artifact, graph: GPT2Graph, store: Store, frame: FrameFiles) -> dict[str, Any]:
    """Quantizes, packs what the `frame` has windows for, and puts the files into the store.

    Returns what a loader has to know: the `pieces` to be shown in a frame of this graph, in its
    order, `weight_bytes` of all of them, and the tables that are looked up, no `embedding` where it
    is the last of the pieces. Raises `OSError` where
    the disk has no room, and `OutOfMemory`.
    """
    embedding = artifact.weights[EMBEDDING]
    # Where the output projection is the embedding, and in int8, rows of it are looked up.
    entry: dict[str, Any] = {"embedding": None}
    sizes = [part.num_bytes for part in graph.parts]
    # Each core packs a matrix, which is there as given, as packed, and as it is kept.
    needed = 1.25 * sum(sizes) + 3 * sum(sorted(sizes)[-cpu_count() :])
    needed += (1.1 if graph.quantized else 4) * embedding.size
    store.check_room(needed)

    def add(part: Part) -> tuple[list[bytes], list[bytes] | list[Place]]:
        """What is not packed, and what is; the large ones in the store already."""
        values = part.make()
        if part.is_matrix:
            [matrix] = values.values()
            return [], keep([matrix.nbytes], [iter([matrix.data])])
        if part.node is None or not frame.windows:
            return [values[name].tobytes() for name in part.shapes], []
        with _packed(part, graph, values, store.building) as (file, tensors):
            given = [values[tensor.name].tobytes() for tensor in tensors if not tensor.packed]
            pieces = [piece for tensor in tensors for piece in tensor.packed]
            return given, keep([length for _, length in pieces], [_read(file, *p) for p in pieces])

    def keep(lengths: list[int], pieces: list[Iterator[bytes | memoryview]]) -> Any:
        if sum(lengths) < OWN_FILE_BYTES:
            return [b"".join(piece) for piece in pieces]
        return _places(store.add(_filled(pieces, PAGE), ".bin"), lengths, PAGE)

    with ThreadPoolExecutor(cpu_count()) as pool:
        parts = _largest_first(pool, add, graph.parts)
        entry["positions"] = embeddings.add_floats(artifact.weights[POSITIONS], store)
        if not graph.quantized:
            entry["embedding"] = embeddings.add_floats(embedding, store)
        elif not artifact.config.tie_word_embeddings:
            quantized = quantize.quantize(embedding, quantize.block_size(embedding.shape[1]))
            entry["embedding"] = embeddings.add_quantized(*quantized, embedding.shape, store)
        given = [data for part in parts for data in part.result()[0]]
        packed = [piece for part in parts for piece in part.result()[1]]
    plain = store.add(_filled([[data] for data in given], ALIGNMENT), ".bin")
    small = [piece for piece in packed if isinstance(piece, bytes)]
    name = store.add(_filled([[piece] for piece in small], PAGE), ".bin") if small else ""
    placed = iter(_places(name, [len(piece) for piece in small], PAGE))
    entry["pieces"] = [
        (plain, 0, _end([len(data) for data in given])),
        *(next(placed) if isinstance(piece, bytes) else piece for piece in packed),
    ]
    entry["weight_bytes"] = sum(length for _, _, length in entry["pieces"])
    return entry


def build_frame(graph: GPT2Graph, store: Store) -> dict[str, Any]:
    """A graph on weights that are blank but for a number, by which onnxruntime finds each of them
    in its own place when it has packed it again.

    Returns the `graph`, the `windows`, which is where it has them packed, and the tensors that are
    to be given to it: the `matrices`, name and length, and the `plain` ones: name, type, shape, and
    where in the first piece they lie. The file takes next to no room on the disk: what lies in the
    windows is never read. There are none where onnxruntime packs what nobody else can see (it does
    so up to 1.23): it `hides` these, and they are plain.
    """

    # The blanks lie over one another, the i-th from the i-th page on, which begins with i + 1.
    longest = max(part.num_bytes for part in graph.parts)
    blanks = np.zeros(len(graph.parts) * PAGE + longest + -longest % PAGE, np.uint8)
    blanks.view(np.uint32)[:: PAGE // 4][: len(graph.parts)] = np.arange(len(graph.parts)) + 1

    def packed(i: int, part: Part) -> list[_Tensor]:
        values, begin = {}, i * PAGE
        for name, (shape, dtype) in part.shapes.items():  # the first alone is numbered
            data = blanks[begin : begin + math.prod(shape) * dtype.itemsize]
            values[name], begin = data.view(dtype).reshape(shape), len(graph.parts) * PAGE
        if part.node is None:
            return [_Tensor(name, {"length": str(v.nbytes)}) for name, v in values.items()]
        with _packed(part, graph, values, store.building) as (_, tensors):
            return tensors

    with ThreadPoolExecutor(cpu_count()) as pool:
        found = list(pool.map(packed, range(len(graph.parts)), graph.parts))
    hides = not all(t[0].packed for part, t in zip(graph.parts, found, strict=True) if part.node)
    if hides:
        for tensor in itertools.chain(*found):
            tensor.packed.clear()
    matrices = {name for part in graph.parts if part.is_matrix for name in part.shapes}
    given = [
        tensor
        for tensors in found
        for tensor in tensors
        if not tensor.packed and tensor.name not in matrices
    ]
    plain_bytes = _end([tensor.length for tensor in given])
    lengths = [length for tensors in found for t in tensors for _, length in t.packed]
    lengths = [len(blanks), plain_bytes, *lengths]
    zeros = sum(length + -length % PAGE for length in lengths[1:])
    holes = (ZEROS[: min(CHUNK_BYTES, zeros - at)] for at in range(0, zeros, CHUNK_BYTES))
    pages = (blanks[at : at + PAGE].tobytes() for at in range(0, len(blanks), PAGE))
    name = store.add(itertools.chain(pages, holes), ".bin")
    _, (_, plain_at, _), *places = _places(name, lengths, PAGE)
    plain_places = _places(name, [tensor.length for tensor in given], ALIGNMENT)
    shapes = {name: shape for part in graph.parts for name, shape in part.shapes.items()}
    model, windows, plain = onnx.ModelProto(), [], []
    model.CopyFrom(graph.model)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for i, tensors in enumerate(found):
        for tensor in tensors:
            if tensor.packed:
                here, places = places[: len(tensor.packed)], places[len(tensor.packed) :]
                windows += here
                here = [(name, i * PAGE, tensor.length), *here]
            elif tensor.name in matrices:  # only that it would be in a file is looked at
                here = [(name, 0, tensor.length)]
            else:
                (_, at, length), *plain_places = plain_places
                shape, dtype = shapes[tensor.name]
                plain.append((tensor.name, dtype.name, shape, at))
                here = [(name, plain_at + at, length)]
            tensor.place(initializers[tensor.name], here)
    graph_name = store.add([model.SerializeToString()], ".onnx")
    return {
        "graph": graph_name,
        "windows": windows,
        "matrices": [(t.name, t.length) for ts in found for t in ts if t.name in matrices],
        "plain": plain,
        "plain_bytes": plain_bytes,
        "hides": hides,
    }


class _Tensor:
    """Where a tensor lies that onnxruntime wrote: as given, and its `prepacked_N` copies.

    It writes both into the protobuf's `external_data`: `offset` and `length`, and `prepacked_0` =
    `kernel|offset;length;checksum`.
    """

    def __init__(self, name: str, entries: dict[str, str]) -> None:
        self.name, self.length = name, int(entries["length"])
        self.packed: list[tuple[int, int]] = []  # offset, length
        self._kernels: list[tuple[str, str, list[str]]] = []
        for key, value in entries.items():
            if key.startswith("prepacked_"):
                kernel, _, place = value.rpartition("|")
                offset, length, *rest = place.split(";")
                self.packed.append((int(offset), int(length)))
                self._kernels.append((key, kernel, rest))

    def place(self, tensor: Any, places: list[Place]) -> None:
        """Has an initializer lie there, as given and packed."""
        (file, offset, length), *others = places
        packed = {
            key: f"{kernel}|{';'.join([str(at), str(size), *rest])}"
            for (key, kernel, rest), (_, at, size) in zip(self._kernels, others, strict=True)
        }
        place_externally(tensor, location=file, offset=offset, length=length, **packed)


@contextmanager
def _packed(
    part: Part, graph: GPT2Graph, values: dict[str, NDArray[Any]], folder: Path
) -> Iterator[tuple[BinaryIO, list[_Tensor]]]:
    """The file that onnxruntime packs a part into, and its tensors in the part's order."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "part.onnx"
        given = {name: values[name] for name in part.shapes}
        weights = onnx_session.pack(only(part, graph.model).SerializeToString(), given, path)
        model = onnx.load_model(path, load_external_data=False)
        found = {
            tensor.name: _Tensor(tensor.name, {e.key: e.value for e in tensor.external_data})
            for tensor in model.graph.initializer
            if tensor.external_data
        }
        with weights.open("rb") as file:
            yield file, [found[name] for name in part.shapes]


def _largest_first(pool: Executor, work: Any, parts: list[Part]) -> list[Any]:
    """So that no core begins the largest last. The futures are in the parts' order."""
    order = sorted(range(len(parts)), key=lambda i: -parts[i].num_bytes)
    futures = {i: pool.submit(work, parts[i]) for i in order}
    return [futures[i] for i in range(len(parts))]


def _places(name: str, lengths: list[int], alignment: int) -> list[Place]:
    """Of pieces in a file, each at a multiple of `alignment`."""
    at, places = 0, []
    for length in lengths:
        places.append((name, at, length))
        at += length + -length % alignment
    return places


def _end(lengths: list[int]) -> int:
    return sum(length + -length % ALIGNMENT for length in lengths)


def _filled(
    pieces: Iterable[Iterable[bytes | memoryview]], alignment: int
) -> Iterator[bytes | memoryview]:
    """Each piece in chunks, filled up to a multiple of `alignment`."""
    for piece in pieces:
        length = 0
        for chunk in piece:
            length += len(chunk)
            for begin in range(0, len(chunk), CHUNK_BYTES):
                yield chunk[begin : begin + CHUNK_BYTES]
        yield bytes(-length % alignment)


def _read(file: BinaryIO, offset: int, length: int) -> Iterator[bytes]:
    file.seek(offset)
    for begin in range(0, length, CHUNK_BYTES):
        wanted = min(CHUNK_BYTES, length - begin)
        chunk = file.read(wanted)
        if len(chunk) != wanted:
            raise OSError(f"{file.name} was not written to its end")
        yield chunk
