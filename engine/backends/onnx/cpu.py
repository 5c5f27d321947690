"""Runs a model with onnxruntime on the CPU: fp32, or int8 weights with int8 arithmetic, and keys
and values in fp32 or int8."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from common import onnx_session
from common.errors import InvalidRequest, OutOfMemory, PromptTooLong
from common.memory import return_freed_memory
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends import mapping, page_cache
from engine.backends.interface import CHUNK, BackendModel, Ids, Logits
from engine.backends.onnx import frames
from engine.backends.onnx.frames import Frame
from engine.prepared.cache import Prepared, prepared
from engine.prepared.embeddings import Table
from engine.prepared.manifest import Run, directly

MAX_ROWS = 32
PAGE = mmap.PAGESIZE
PIECE = 16  # where the number of tokens that are computed at once changes no bit
FLOAT = np.dtype(np.float32)

Values = NDArray[Any]  # keys and values, fp32 or int8

_pieces: dict[str, int] = {}  # by frame

to_ort = onnxruntime.OrtValue.ortvalue_from_numpy  # no copy, as long as the array is contiguous


class OnnxModel(BackendModel):
    """On a graph of `engine.backends.onnx.graph`."""

    max_rows = MAX_ROWS
    keeps = True
    _cache: MappedKVCache

    def __init__(self, config: GPT2Config, found: Prepared, frame: Frame | None = None) -> None:
        """`frame`: one that is not to be had from those that are kept."""
        self.config = config
        self.weight_bytes = found.weight_bytes
        self._positions = found.positions
        self._frame = frame or frames.take(found.frame, found.pieces)
        self._embedding = self._head() if found.embedding is None else found.embedding
        if self._frame.can_show_another:
            positions = self._positions.ctypes.data, self._positions.nbytes
            self.mapped = [*self._frame.windows, positions]
        self._session = self._frame.session
        past = [i for i in self._session.get_inputs() if i.name.startswith("past_")]
        self._kv_names = [i.name.removeprefix("past_") for i in past]
        _, heads, _, head_size = past[0].shape
        dtype = np.dtype(np.int8 if past[0].type == "tensor(int8)" else np.float32)
        self.kv_bytes_per_token = config.kv_bytes_per_token * dtype.itemsize // 4
        self._cache = MappedKVCache(len(past), heads, head_size, config.max_length, dtype)
        # What a decode step reads and writes, always in the same place.
        self._x = np.zeros((MAX_ROWS, 1, config.units), dtype=np.float32)
        self._last = np.zeros(MAX_ROWS, dtype=np.int32)
        self._total = np.zeros(1, dtype=np.int32)
        self._logits = np.zeros((MAX_ROWS, config.vocab_size), dtype=np.float32)
        self._bindings: dict[int, Any] = {}
        if found.frame.key not in _pieces:
            _pieces[found.frame.key] = self._find_piece()
        self.piece = _pieces[found.frame.key]

    def _head(self) -> Table:
        """The output projection, which is the embedding, and the last of the windows."""
        shape = self.config.vocab_size, self.config.units
        return Table(page_cache.bytes_at(*self._frame.windows[-1]), shape)

    def _find_piece(self) -> int:
        """Tries whether a kernel for other numbers of tokens adds up in another order: keys and
        values of a chunk at once, and of parts of it."""
        end = min(CHUNK["cpu"], self.config.max_length)
        ids = np.arange(end) % self.config.vocab_size
        found = []
        for edges in ((0, end), (0, 2, 5, 16, 33, end)):
            row = self.add_row()
            for begin, until in itertools.pairwise(sorted({min(edge, end) for edge in edges})):
                self.extend(row, ids[begin:until])
            found.append(self._cache.array[:, row, :, : self.length(row)].copy())
            self.remove_last_row()
        return PIECE if np.array_equal(found[0], found[1]) else CHUNK["cpu"]

    def extend(self, row: int, ids: Ids) -> Logits:
        """Any number of ids after any number of cached ones: exact, since the row is alone."""
        begin = self._cache.lengths[row]
        end = begin + len(ids)
        check_ids(self.config, ids, end)
        last, total = np.array([end - 1], dtype=np.int32), np.array([end], dtype=np.int32)
        logits = np.empty((1, self.config.vocab_size), dtype=np.float32)
        with onnx_session.out_of_memory(f"{len(ids)} more tokens"):
            x = self._embedding[ids]  # (T, C)
            x += self._positions[begin:end]
            binding = self._bind(row, row + 1, x[None], last, total, logits)
            self._session.run_with_iobinding(binding)
        self._cache.lengths[row] = end
        first: Logits = logits[0]
        return first

    def decode(self, ids: Ids) -> Logits:
        rows = len(ids)
        lengths = np.array(self._cache.lengths[:rows], dtype=np.int32)
        check_ids(self.config, ids, int(lengths.max()) + 1)
        np.add(self._embedding[ids], self._positions[lengths], out=self._x[:rows, 0])
        self._last[:rows] = lengths
        self._total[0] = lengths.max() + 1
        if rows not in self._bindings:
            x, last, logits = self._x[:rows], self._last[:rows], self._logits[:rows]
            self._bindings[rows] = self._bind(0, rows, x, last, self._total, logits)
        with onnx_session.out_of_memory(f"a step of {rows} rows"):
            self._session.run_with_iobinding(self._bindings[rows])
        for row in range(rows):
            self._cache.lengths[row] += 1
        return self._logits[:rows]

    def close(self) -> None:
        del self._bindings, self._session, self._cache, self._embedding, self._positions
        frames.give_back(self._frame)
        del self._frame
        return_freed_memory()

    def _bind(
        self,
        begin: int,
        end: int,
        x: NDArray[np.float32],
        last: NDArray[np.int32],
        total: NDArray[np.int32],
        logits: Logits,
    ) -> Any:
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("x", to_ort(x))
        binding.bind_ortvalue_input("seqlens_k", to_ort(last))
        binding.bind_ortvalue_input("total", to_ort(total))
        binding.bind_ortvalue_output("logits", to_ort(logits))
        for i, name in enumerate(self._kv_names):
            value = to_ort(self._cache.array[i, begin:end])
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        return binding


def check_ids(config: GPT2Config, ids: Ids, end: int) -> None:
    """Raises unless the model has these ids, and room for a row of `end` tokens."""
    if end > config.max_length:
        raise PromptTooLong(f"{end} tokens do not fit the {config.max_length} of the model")
    # numpy would take a negative id from the end of the table.
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise InvalidRequest(f"token ids must be from 0 to {config.vocab_size - 1}")


class MappedKVCache:
    """Keys and values of all rows in one anonymous mapping that takes memory where it is written.

    `array` is (buffers, rows, heads, capacity, head size) with a key and a value buffer for each
    layer. One head of one row is a whole number of pages, so a row can go elsewhere without being
    copied, and without new pages, which cost ten times as much as copying.
    """

    def __init__(
        self,
        buffers: int,
        heads: int,
        head_size: int,
        max_length: int,
        dtype: np.dtype[Any] = FLOAT,
    ) -> None:
        self.lengths: list[int] = []
        self._dtype, self._token_bytes = dtype, dtype.itemsize * head_size
        whole_pages = PAGE // np.gcd(PAGE, self._token_bytes)  # tokens
        self._capacity = int(-(-max_length // whole_pages) * whole_pages)
        self._row_bytes = heads * self._capacity * self._token_bytes
        self._memory, self.array = self._reserve(buffers, MAX_ROWS, heads, head_size)
        self._renew()

    def _reserve(
        self, buffers: int, rows: int, heads: int, head_size: int
    ) -> tuple[mmap.mmap, Values]:
        try:
            memory = mmap.mmap(-1, buffers * rows * self._row_bytes, flags=mapping.RESERVED)
        except OSError as error:
            raise OutOfMemory("there is no address space for keys and values") from error
        shape = (buffers, rows, heads, self._capacity, head_size)
        return memory, np.frombuffer(memory, self._dtype).reshape(shape)

    def _renew(self) -> None:
        """Gives all memory back, and makes one mapping of the many that rows leave which came from
        elsewhere."""
        everything = mmap.PROT_READ | mmap.PROT_WRITE
        mapping.map_over(self.array.ctypes.data, self.array.nbytes, everything, mapping.RESERVED)
        # A huge page would hold 2 MiB for a first token, 288 times over in the full-size model.
        with suppress(OSError):  # a kernel that has none
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    @property
    def num_bytes(self) -> int:
        return sum(map(self._bytes, self.lengths))

    def num_bytes_for(self, lengths: Sequence[int]) -> int:
        buffers, _, heads = self.array.shape[:3]
        return sum(lengths) * buffers * heads * self._token_bytes

    def _bytes(self, length: int) -> int:
        """Of the pages that `length` tokens touch."""
        buffers, _, heads = self.array.shape[:3]
        return buffers * heads * self._head_bytes(length)

    def add_row(self) -> int:
        if len(self.lengths) == MAX_ROWS:
            raise OutOfMemory(f"all {MAX_ROWS} rows of the batch are taken")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def move_row(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is, and this one is empty."""
        if source != target:
            self._move(self.array[:, source], self.array[:, target], self.lengths[source])
            self.lengths[target], self.lengths[source] = self.lengths[source], 0

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.array[:, target, :, :length] = self.array[:, source, :, :length]
        self.lengths[target] = length

    def keep_row(self, row: int, length: int) -> KeptRow:
        """The first `length` tokens of a row, which is empty then."""
        buffers, _, heads, _, head_size = self.array.shape
        memory, array = self._reserve(buffers, 1, heads, head_size)
        kept = KeptRow(memory, array[:, 0], length, self._bytes(length))
        self._move(self.array[:, row], kept.array, self.lengths[row])
        self._cut(kept.array, self.lengths[row], length)
        self.lengths[row] = 0
        return kept

    def fill_row(self, row: int, kept: KeptRow, length: int, last: bool) -> None:
        """An empty row becomes the first `length` tokens of what was kept: a copy of it, or with
        `last` that itself."""
        if last:
            self._move(kept.array, self.array[:, row], kept.length)
            self._cut(self.array[:, row], kept.length, length)
        else:
            self.array[:, row, :, :length] = kept.array[:, :, :length]
        self.lengths[row] = length

    def remove_last_row(self) -> None:
        self.lengths.pop()
        if self.lengths:
            self._release(self.array[:, len(self.lengths)])
        else:
            self._renew()

    def _release(self, row: Values) -> None:
        for address in _addresses(row):
            mapping.release(address, self._row_bytes)

    def _move(self, source: Values, target: Values, length: int) -> None:
        """Two rows (buffers, heads, capacity, head size): their pages, or where that is not to be
        had, what `length` tokens have on them."""
        pairs = enumerate(zip(_addresses(source), _addresses(target), strict=True))
        for i, (old, new) in pairs:
            if not mapping.move(old, new, self._row_bytes):
                mapping.release(new, self._row_bytes)
                target[i, :, :length] = source[i, :, :length]
                mapping.release(old, self._row_bytes)

    def _cut(self, row: Values, before: int, length: int) -> None:
        """Gives back the pages behind `length` of a row that has had `before` tokens."""
        kept, had = self._head_bytes(length), self._head_bytes(before)
        if kept < had:
            for address in _addresses(row):
                for head in range(address, address + self._row_bytes, row.strides[1]):
                    mapping.release(head + kept, had - kept)

    def _head_bytes(self, length: int) -> int:
        """Bytes of the pages that one head of `length` tokens touches."""
        return -(-length * self._token_bytes // PAGE) * PAGE


def _addresses(row: Values) -> Iterator[int]:
    """Where a row (buffers, heads, capacity, head size) begins in each buffer."""
    first = row.ctypes.data
    return (first + buffer * row.strides[0] for buffer in range(len(row)))


@dataclass
class KeptRow:
    """Keys and values of a row that is done: `array` (buffers, heads, capacity, head size)."""

    memory: mmap.mmap  # the array's
    array: Values
    length: int  # tokens
    num_bytes: int


def load(
    artifact: Artifact, precision: str, *, cache_dir: Path | None = None, run: Run = directly
) -> OnnxModel:
    """Loads a model, `precision` `fp32`, `int8` or `int8-kv8`, from the cache of prepared models.

    The cache (see `engine.prepared.cache`) is `cache_dir` or a folder in the artifact's own; `run`
    builds what is not in it. Raises `OutOfMemory`, `ArtifactError`.
    """
    frames.wait_for((artifact.config, precision))
    with prepared(artifact, precision, cache_dir, run) as found:
        return OnnxModel(artifact.config, found)
