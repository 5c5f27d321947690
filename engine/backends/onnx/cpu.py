"""Runs a model with onnxruntime on the CPU: fp32, or int8 weights with int8 arithmetic, and keys
and values in fp32 or int8."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from common import onnx_session
from common.memory import return_freed_memory
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends import page_cache
from engine.backends.interface import CHUNK, BackendModel, Ids, Logits, check_ids
from engine.backends.mapped_kv_cache import MAX_ROWS, MappedKVCache
from engine.backends.mapping import RESERVED
from engine.backends.onnx import frames
from engine.backends.onnx.frames import Frame
from engine.prepared.cache import Prepared, prepared
from engine.prepared.embeddings import Table
from engine.prepared.manifest import Run, directly

# Smaller ones are as exact, but `cached_tokens` would say more of what others have asked.
PIECE = 16
TRIED = CHUNK["cpu"] + 8  # tokens by which it is found out whether they are

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
        # 6 MB at full size, of which a batch takes its rows only: what the heap has may be in use.
        memory = mmap.mmap(-1, 4 * MAX_ROWS * config.vocab_size, flags=RESERVED)
        self._logits = np.frombuffer(memory, np.float32).reshape(MAX_ROWS, config.vocab_size)
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
        values of a chunk and a little more at once, and of other parts of it."""
        chunk, end = CHUNK["cpu"], min(TRIED, self.config.max_length)
        ids = np.arange(end) % self.config.vocab_size
        found = []
        for edges in ((0, chunk, end), (0, 2, 5, 16, 33, chunk + 4, end)):
            row = self.add_row()
            for begin, until in itertools.pairwise(sorted({min(edge, end) for edge in edges})):
                self.extend(row, ids[begin:until])
            found.append(self._cache.array[:, row, :, : self.length(row)].copy())
            self.remove_last_row()
        return PIECE if np.array_equal(found[0], found[1]) else chunk

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
