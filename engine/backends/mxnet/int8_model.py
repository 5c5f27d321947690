"""Runs a model on a CPU with int8 weights: their products in MXNet, what is between them in numpy,
which has done such small things before MXNet has begun.

In shapes: M tokens that are computed at once, of one row or of as many; C units, nh heads, hs head
size, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.memory import return_freed_memory
from common.mxnet_compat import mx
from engine.artifacts import artifact as names
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends.interface import CHUNK, BackendModel, Ids, Logits, check_ids
from engine.backends.mapped_kv_cache import MAX_ROWS, MappedKVCache, Values
from engine.backends.mxnet.int8_products import Floats, Operator, Product, Scratch, shared
from engine.backends.mxnet.kv_cache import out_of_memory
from engine.prepared.int8 import Int8Weights, prepared
from engine.prepared.manifest import Run, directly

EMBEDDING = names.EMBEDDING.removesuffix(".weight")
PRODUCTS = (names.QKV, names.ATTENTION_OUT, names.FFN_HIDDEN, names.FFN_OUT)
GELU = Operator("LeakyReLU", act_type="gelu")  # the exact (erf) form
MOST = max(CHUNK["cpu"], MAX_ROWS)  # tokens at once


class Int8Model(BackendModel):
    """On the weights of `engine.prepared.int8`."""

    max_rows = MAX_ROWS
    piece = CHUNK["cpu"]
    keeps = True
    _cache: MappedKVCache

    def __init__(self, config: GPT2Config, weights: Int8Weights) -> None:
        self.config = config
        self.weight_bytes, self.mapped = weights.num_bytes, weights.spans
        self.kv_bytes_per_token = config.kv_bytes_per_token
        self._cache = MappedKVCache(
            2 * config.num_layers, config.num_heads, config.head_size, config.max_length
        )
        self._weights = weights
        scratch = Scratch(
            MOST,
            max(config.units, config.hidden_size),
            max(3 * config.units, config.hidden_size, config.vocab_size),
        )
        self._layers = [
            [Product(weights, name.format(i), scratch) for name in PRODUCTS]
            for i in range(config.num_layers)
        ]
        head = names.EMBEDDING if config.tie_word_embeddings else names.OUTPUT
        self._head = Product(weights, head.removesuffix(".weight"), scratch)
        self._hidden_memory = np.empty((MOST, config.hidden_size), np.float32)
        self._hidden: dict[int, tuple[Floats, Any]] = {}
        # What a token must not see of those that are computed with it.
        self._future = np.triu(np.full((MOST, MOST), -np.inf, np.float32), 1)

    def extend(self, row: int, ids: Ids) -> Logits:
        begin = self._cache.lengths[row]
        check_ids(self.config, ids, begin + len(ids))
        with out_of_memory(mx.cpu(), f"{len(ids)} more tokens"):
            while len(ids):
                # In the same pieces, however many come at once.
                T = min(len(ids), MOST - begin % MOST)
                last = self._run([row], np.arange(begin, begin + T), ids[:T])
                begin, ids = begin + T, ids[T:]
                self._cache.lengths[row] = begin
            logits: Logits = self._logits(last[-1:])[0]
        return logits

    def decode(self, ids: Ids) -> Logits:
        rows = range(len(ids))
        positions = np.array(self._cache.lengths[: len(ids)])
        check_ids(self.config, ids, int(positions.max()) + 1)
        with out_of_memory(mx.cpu(), f"a step of {len(ids)} rows"):
            logits = self._logits(self._run(rows, positions, ids))
        for row in rows:
            self._cache.lengths[row] += 1
        return logits

    def close(self) -> None:
        del self._cache, self._weights, self._layers, self._head
        self.mapped = ()
        return_freed_memory()

    def _run(self, rows: Any, positions: NDArray[np.int64], ids: Ids) -> Floats:
        """(M,) tokens of one row, or one of each -> (M, C) before the last LayerNorm."""
        weights = self._weights
        x: Floats = weights[f"{EMBEDDING}.q"][ids] * weights[f"{EMBEDDING}.scale"][ids, None]
        x += weights[names.POSITIONS][positions]
        for i, (qkv, attention_out, hidden, out) in enumerate(self._layers):
            h = qkv(self._norm(x, names.ATTENTION_NORM.format(i)))
            x += attention_out(self._attend(i, rows, positions, h))
            x += out(self._activate(hidden, self._norm(x, names.FFN_NORM.format(i))))
        return x

    def _logits(self, x: Floats) -> Logits:  # (M, C) -> (M, V)
        return self._head(self._norm(x, names.FINAL_NORM))

    def _norm(self, x: Floats, name: str) -> Floats:
        y: Floats = x - np.add.reduce(x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
        variance = np.add.reduce(y * y, axis=-1, keepdims=True) / np.float32(x.shape[-1])
        y /= np.sqrt(variance + np.float32(self.config.layer_norm_eps))
        y *= self._weights[f"{name}.gamma"]
        y += self._weights[f"{name}.beta"]
        return y

    def _activate(self, hidden: Product, x: Floats) -> Floats:  # (M, C) -> (M, hidden size)
        h, same = self._hidden.get(len(x)) or self._share_hidden(len(x))
        hidden(x, h)
        if self.config.activation == "gelu_new":
            return gelu_tanh(h)
        GELU([same], [same])
        same.wait_to_read()
        return h

    def _share_hidden(self, rows: int) -> tuple[Floats, Any]:
        """Memory (rows, hidden size) as numpy and as MXNet have it."""
        array = self._hidden_memory[:rows]
        self._hidden[rows] = array, shared(array)
        return self._hidden[rows]

    def _attend(
        self, layer: int, rows: Any, positions: NDArray[np.int64], qkv: Floats
    ) -> Floats:  # (M, 3C) -> (M, C)
        nh, hs = self.config.num_heads, self.config.head_size
        q, k, v = qkv.reshape(len(qkv), 3, nh, hs).swapaxes(0, 1)  # (M, nh, hs)
        q *= np.float32(self.config.attention_scale(layer))
        keys, values = self._cache.array[2 * layer : 2 * layer + 2]  # (rows, nh, capacity, hs)
        y = np.empty((len(qkv), nh, hs), np.float32)
        if len(rows) == 1:
            (row,), end = rows, positions[-1] + 1
            keys[row, :, positions[0] : end] = k.swapaxes(0, 1)
            values[row, :, positions[0] : end] = v.swapaxes(0, 1)
            self._attend_row(q, keys[row, :, :end], values[row, :, :end], y)
        else:
            keys[rows, :, positions], values[rows, :, positions] = k, v
            for row in rows:
                end = positions[row] + 1
                here = slice(row, row + 1)
                self._attend_row(q[here], keys[row, :, :end], values[row, :, :end], y[here])
        return y.reshape(len(qkv), -1)

    def _attend_row(self, q: Floats, keys: Values, values: Values, y: Floats) -> None:
        """q, y (T, nh, hs), keys and values (nh, L, hs): the last T of L tokens."""
        T = len(q)
        scores = q.swapaxes(0, 1) @ keys.swapaxes(1, 2)  # (nh, T, L)
        if T > 1:
            scores[:, :, -T:] += self._future[:T, :T]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= np.add.reduce(scores, axis=-1, keepdims=True)
        y[...] = (scores @ values).swapaxes(0, 1)


def gelu_tanh(x: Floats) -> Floats:
    """As `engine.backends.mxnet.gpt2` has it."""
    y = x * x
    y *= np.float32(0.044715)
    y += 1
    y *= x
    y *= np.float32(0.7978845608028654)
    np.tanh(y, out=y)
    y += 1
    y *= x
    y *= np.float32(0.5)
    return y


def load(artifact: Artifact, *, cache_dir: Path | None = None, run: Run = directly) -> Int8Model:
    """Loads a model from the cache of prepared models (`engine.prepared.int8`): `cache_dir` or a
    folder in the artifact's own; `run` builds what is not in it.

    Raises `OutOfMemory`, `ArtifactError`.
    """
    with prepared(artifact, cache_dir, run) as weights:
        return Int8Model(artifact.config, weights)
