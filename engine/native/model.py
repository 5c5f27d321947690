"""Runs a model with the native library."""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Sequence

import numpy as np

from engine.backends.interface import BackendModel, Logits, Piece, Row, WeightsLost, check_ids
from engine.native import library
from engine.native.arena import Arena, NativeRow
from engine.native.prepared import Prepared

RunPass = Callable[[library.Model, int, "ctypes.Array[library.Piece]", int, int], None]

_lock = threading.Lock()
_arenas: dict[int, tuple[Arena, int]] = {}  # by bytes of a page, with the number of users
_logits: list[mmap.mmap] = []  # at most one mapping, for the logits of all passes
_start = functools.cache(library.start)


def _open_arena(page_bytes: int) -> Arena:
    with _lock:
        _start()
        arena, models = _arenas.get(page_bytes) or (Arena(page_bytes), 0)
        _arenas[page_bytes] = arena, models + 1
        return arena


def _close_arena(page_bytes: int) -> None:
    with _lock:
        arena, models = _arenas.pop(page_bytes)
        if models > 1:
            _arenas[page_bytes] = arena, models - 1
        arena.trim()


def release_memory() -> None:
    """Return unused memory of passes and rows to the system. Must be called between passes."""
    with _lock:
        for arena, _ in _arenas.values():
            arena.trim()
    library.release_scratch()
    _logits.clear()  # unmapped with the last array on it


def _logits_rows(count: int, width: int) -> Logits:
    """Return an array (count, width) for logits, in memory that passes of all models reuse."""
    size = max(count * width * 4, 1)
    if not _logits or len(_logits[0]) < size:
        _logits[:] = [mmap.mmap(-1, size)]
    return np.frombuffer(_logits[0], np.float32, count * width).reshape(count, width)


class NativeModel(BackendModel):
    """A model: a prepared file, its struct of pointers, and rows in the arena of its shape."""

    max_rows = 1 << 16
    caches_rows = checks_guesses = True

    def __init__(self, prepared: Prepared, run_pass: RunPass = library.run_pass) -> None:
        config, file = prepared.config, prepared.file
        self.config, self._prepared, self._run_pass = config, prepared, run_pass
        self.weight_bytes, self.mapped = file.num_bytes, [file.span]
        self._model, self._layers = _struct(prepared)
        self._page_bytes = library.page_bytes(config, prepared.precision)
        self._arena = _open_arena(self._page_bytes)
        self._rows: set[NativeRow] = set()
        self._row = -(-config.units // library.LINE) * library.LINE

    def open_row(self, source: Row | None = None, length: int = 0) -> NativeRow:
        row = NativeRow(self._arena, self.config.max_length)
        if isinstance(source, NativeRow) and length:
            row.begin_with(source, length)
        self._rows.add(row)
        return row

    def truncate(self, row: Row, length: int) -> None:
        assert isinstance(row, NativeRow)
        row.truncate(length)

    def close_row(self, row: Row) -> None:
        assert isinstance(row, NativeRow)
        self._rows.discard(row)
        row.truncate(0)

    def run(self, pieces: Sequence[Piece]) -> Logits:
        for piece in pieces:
            check_ids(self.config, piece)
        array = (library.Piece * len(pieces))()
        ids = np.array([token for piece in pieces for token in piece.ids], np.int32)
        at, wanted = ids.ctypes.data, 0
        for entry, piece in zip(array, pieces, strict=True):
            row, count = piece.row, len(piece.ids)
            assert isinstance(row, NativeRow)
            row.reserve(row.length + count)
            entry.ids, entry.pages = at, row.address
            entry.count, entry.position, entry.num_logits = count, row.length, piece.num_logits
            entry.adapter = None if piece.adapter is None else piece.adapter.address
            if piece.num_states:
                states = np.empty((piece.num_states, self._row), np.float32)
                entry.num_logits, entry.states = piece.num_states, states.ctypes.data
                piece.states = states[:, : self.config.units]
            at += 4 * count
            wanted += piece.num_logits
        vocab = max((p.vocab_size(self.config) for p in pieces), default=self.config.vocab_size)
        logits = _logits_rows(wanted, -(-vocab // library.LINE) * library.LINE)
        self._run_pass(self._model, self._arena.address, array, len(array), logits.ctypes.data)
        if self._prepared.file.is_lost():
            raise WeightsLost
        adapters = {piece.adapter for piece in pieces if piece.adapter is not None}
        if lost := {adapter for adapter in adapters if adapter.is_lost()}:
            raise WeightsLost(lost)
        for piece in pieces:
            assert isinstance(piece.row, NativeRow)
            piece.row.length += len(piece.ids)
        return logits[:, :vocab]

    def kv_bytes_for(self, lengths: Sequence[int]) -> int:
        return self._page_bytes * sum(-(-n // library.PAGE_TOKENS) for n in lengths)

    @property
    def kv_bytes(self) -> int:
        return sum(row.num_bytes for row in tuple(self._rows))

    def close(self) -> None:
        for row in tuple(self._rows):
            self.close_row(row)
        self.mapped = ()
        self._prepared.close()
        _close_arena(self._page_bytes)


def _struct(prepared: Prepared) -> tuple[library.Model, ctypes.Array[library.Layer]]:
    """Return a model's struct for the library, and its layers, which must live as long."""
    config, addresses = prepared.config, prepared.file.addresses

    def norm(name: str) -> library.Norm:
        return library.Norm(addresses.get(f"{name}.gamma"), addresses.get(f"{name}.beta"))

    def matrix(name: str) -> library.Matrix:
        return library.Matrix(addresses[f"{name}.weight"], addresses.get(f"{name}.bias"))

    layers = (library.Layer * config.num_layers)()
    for i, layer in enumerate(layers):
        layer.attention_norm = norm(f"layers.{i}.attention_norm")
        layer.ffn_norm = norm(f"layers.{i}.ffn_norm")
        for name in library.PRODUCTS:
            setattr(layer, name, matrix(f"layers.{i}.{name}"))
        layer.attention_scale = config.attention_scale(i)
    model = library.Model(
        num_layers=config.num_layers,
        units=config.units,
        heads=config.num_heads,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        max_length=config.max_length,
        int8=prepared.precision == "int8",
        gelu_tanh=config.activation == "gelu_new",
        epsilon=config.layer_norm_eps,
        layers=layers,
        final_norm=norm("final_norm"),
        embedding=addresses["embedding.weight"],
        positions=addresses["positions"],
        head=matrix("embedding" if config.tie_word_embeddings else "head"),
    )
    return model, layers
