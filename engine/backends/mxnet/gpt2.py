"""GPT-2 in MXNet with a K/V cache: one file, read top to bottom.

In shapes: B rows, T new tokens, P cached tokens, C units, nh heads, hs head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from engine.artifacts import artifact
from engine.artifacts.config import GPT2Config
from engine.backends.mxnet.kv_cache import MXNetKVCache

nd = mx.nd


def product(x: Any, weight: Any, bias: Any = None) -> Any:  # (..., in) -> (..., out)
    """x W^T + b with W (out, in)."""
    return nd.FullyConnected(
        *((x, weight) if bias is None else (x, weight, bias)),
        num_hidden=weight.shape[0],
        no_bias=bias is None,
        flatten=False,
    )


class GPT2:
    """GPT-2 on arrays of MXNet.

    `weights` has the names of `engine.artifacts.artifact.shapes`, and arrays of numpy or MXNet;
    arrays of MXNet are not copied.
    """

    def __init__(self, config: GPT2Config, weights: Mapping[str, Any], ctx: Any = None) -> None:
        self.config, self._ctx = config, ctx or mx.cpu()
        self._weights = {n: self._array(weights[n]) for n, _ in artifact.shapes(config)}

    def _array(self, value: Any) -> Any:
        if isinstance(value, nd.NDArray):
            return value
        return nd.array(value, dtype="float32", ctx=self._ctx)

    def wait(self) -> None:
        """Wait until all weights are loaded. Raises `MXNetError` if that fails."""
        for array in self._weights.values():
            array.wait_to_read()

    def __call__(self, ids: Any, cache: MXNetKVCache | None = None) -> Any:
        """Return the logits (B, T, V) after each of `ids` (B, T), which are whole texts.

        With a cache, `ids` are T new tokens of the rows that `cache.select` chose, and the logits
        (B, V) are those after the last; the rows' lengths do not change.
        """
        B, T = ids.shape
        positions = np.broadcast_to(np.arange(T), (B, T)) if cache is None else cache.begin(T)
        ctx = ids.context
        lengths = np.repeat(positions + 1, self.config.num_heads, axis=0)
        lengths = nd.array(lengths, ctx=ctx, dtype="int32")
        x = self._embed(ids, artifact.EMBEDDING)
        x = x + self._embed(nd.array(positions, ctx=ctx), artifact.POSITIONS)  # (B, T, C)
        for i in range(self.config.num_layers):
            h = self._norm(x, artifact.ATTENTION_NORM.format(i))
            x = x + self._attend(h, lengths, cache, i)
            h = self._norm(x, artifact.FFN_NORM.format(i))
            h = self._gelu(self._product(h, artifact.FFN_HIDDEN.format(i)))
            x = x + self._product(h, artifact.FFN_OUT.format(i))
        if cache is not None:
            x = nd.slice_axis(x, axis=1, begin=T - 1, end=T).reshape((len(x), -1))
        x = self._norm(x, artifact.FINAL_NORM)
        tied = self.config.tie_word_embeddings
        return product(x, self._weights[artifact.EMBEDDING if tied else artifact.OUTPUT])

    def _gelu(self, x: Any) -> Any:
        if self.config.activation == "gelu":  # the exact form, with erf
            return nd.LeakyReLU(x, act_type="gelu")
        # Hendrycks and Gimpel's tanh approximation, `gelu_new` in Hugging Face's configurations
        return 0.5 * x * (1 + nd.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))

    def _product(self, x: Any, name: str) -> Any:
        return product(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _embed(self, ids: Any, name: str) -> Any:  # (B, T) -> (B, T, C)
        table = self._weights[name]
        return nd.Embedding(ids, table, input_dim=table.shape[0], output_dim=table.shape[1])

    def _norm(self, x: Any, name: str) -> Any:
        gamma, beta = self._weights[f"{name}.gamma"], self._weights[f"{name}.beta"]
        return nd.LayerNorm(x, gamma, beta, axis=-1, eps=self.config.layer_norm_eps)

    def _attend(self, x: Any, lengths: Any, cache: MXNetKVCache | None, layer: int) -> Any:
        """x (B, T, C) -> (B, T, C). lengths (B * nh, T): how many positions each query sees."""
        B, T, C = x.shape
        hs, nh = self.config.head_size, self.config.num_heads
        qkv = self._product(x, artifact.QKV.format(layer))  # (B, T, 3C): q, k, v, heads inside each
        q, k, v = (
            z.reshape((B, T, nh, hs)).transpose((0, 2, 1, 3)).reshape((B * nh, T, hs))
            for z in nd.split(qkv, num_outputs=3, axis=-1)
        )
        if cache is not None:
            k, v = cache.update(layer, k, v)  # (B * nh, capacity, hs)
        scores = nd.batch_dot(q * self.config.attention_scale(layer), k, transpose_b=True)
        # The causal mask is a length: query i of a row with P cached tokens sees P + i + 1.
        weights = nd.softmax(scores, length=lengths, use_length=True, axis=-1)  # (B * nh, T, P + T)
        y = nd.batch_dot(weights, v).reshape((B, nh, T, hs)).transpose((0, 2, 1, 3))
        return self._product(y.reshape((B, T, C)), artifact.ATTENTION_OUT.format(layer))
