"""GPT-2 in Gluon with a K/V cache: one file, read top to bottom.

Parameter names are those of KoGPT2 v1's `.params` files (`_embed.weight`,
`_self_attention_layers.0._multi_head_qkv_proj.weight`, ...), so `load_parameters` and
`save_parameters` speak that format.

In shapes: B rows, T new tokens, P cached tokens, C units, nh heads, hs head size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from engine.artifacts.config import GPT2Config
from engine.backends.mxnet.kv_cache import ShardedKVCache
from engine.backends.mxnet.rows import padded

nd, gluon, nn = mx.nd, mx.gluon, mx.gluon.nn

# With several rows oneDNN reads a weight more than once: from the cache, if it fits there.
LOGITS_BLOCK_BYTES = 4 << 20


class Dense(gluon.Block):  # type: ignore[misc, name-defined]
    """y = x W^T + b with W (out, in)."""

    def __init__(self, out_units: int, in_units: int, use_bias: bool = True, params: Any = None):
        super().__init__(params=params)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(out_units, in_units))
            self.bias = (
                self.params.get("bias", shape=(out_units,), init="zeros") if use_bias else None
            )

    def data(self) -> tuple[Any, Any]:
        return self.weight.data(), None if self.bias is None else self.bias.data()

    def take(self) -> tuple[Any, Any]:
        """The arrays, which this block gives up: they are about to be cut into shards."""
        weight, bias = self.data()
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter._data = None
        return weight, bias

    def forward(self, x: Any) -> Any:  # (..., in) -> (..., out)
        return product(x, *self.data())


def product(x: Any, weight: Any, bias: Any = None) -> Any:
    """x W^T + b."""
    return nd.FullyConnected(
        *((x, weight) if bias is None else (x, weight, bias)),
        num_hidden=weight.shape[0],
        no_bias=bias is None,
        flatten=False,
    )


# Attention and feed-forward can be cut into shards, as Megatron-LM cuts them for several GPUs
# (Shoeybi et al. 2019): each shard has some of the heads, or some of the hidden units, and gives a
# part of the sum that the residual stream gets. MXNet computes an fp32 product of few rows on one
# core; the shards are independent, so its engine computes them side by side.


class SelfAttention(gluon.Block):  # type: ignore[misc, name-defined]
    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self._head_size, self._scale = config.head_size, config.attention_scale(layer)
        self._multi_head_qkv_proj = Dense(3 * config.units, config.units)
        self._out_proj = Dense(config.units, config.units)
        self._shards: list[tuple[Any, ...]] = []

    def shard(self, n: int) -> None:
        (w, b), (w_out, b_out) = self._multi_head_qkv_proj.take(), self._out_proj.take()
        C = w_out.shape[0]
        for cut in _cuts(C, n):
            rows = [slice(i * C + cut.start, i * C + cut.stop) for i in range(3)]
            w_s, b_s = (nd.concat(*(whole[r] for r in rows), dim=0) for whole in (w, b))
            w_s[: C // n], b_s[: C // n] = w_s[: C // n] * self._scale, b_s[: C // n] * self._scale
            w_out_s = nd.slice_axis(w_out, axis=1, begin=cut.start, end=cut.stop)
            self._shards.append((w_s, b_s, w_out_s, None if self._shards else b_out))

    def forward(
        self, x: Any, lengths: Any, cache: ShardedKVCache | None, layer: int, fill: Any = None
    ) -> list[Any]:
        """x (B, T, C) -> parts (B, T, C) of a sum.

        lengths (B * heads of a shard, T): how many positions each query may see. With `fill`, x has
        rows more than that, to fill up a product: fill (B) says whose attention they get.
        """
        shards = self._shards or [(*self._multi_head_qkv_proj.data(), *self._out_proj.data())]
        return [self._attend(x, lengths, cache, (layer, i), fill, *s) for i, s in enumerate(shards)]

    def _attend(
        self,
        x: Any,
        lengths: Any,
        cache: ShardedKVCache | None,
        place: tuple[int, int],
        fill: Any,
        w_qkv: Any,
        b_qkv: Any,
        w_out: Any,
        b_out: Any,
    ) -> Any:
        T = x.shape[1]
        hs = self._head_size
        C = w_out.shape[1]  # units of this shard: its heads
        nh = C // hs
        B = lengths.shape[0] // nh
        qkv = product(x, w_qkv, b_qkv)[:B]  # (B, T, 3C): q, k, v, heads inside each
        q, k, v = nd.split(qkv, num_outputs=3, axis=-1)
        if T == 1:
            q, k, v = (z.reshape((B * nh, 1, hs)) for z in (q, k, v))
        else:
            q, k, v = (
                z.reshape((B, T, nh, hs)).transpose((0, 2, 1, 3)).reshape((B * nh, T, hs))
                for z in (q, k, v)
            )
        if cache is not None:
            k, v = cache.update(place, k, v)  # (B * nh, capacity, hs)
        if not self._shards:  # otherwise the weights are scaled
            q = q * self._scale
        scores = nd.batch_dot(q, k, transpose_b=True)  # (B * nh, T, P + T)
        # The causal mask is a length: query i of a row with P cached tokens sees P + i + 1.
        weights = nd.softmax(scores, length=lengths, use_length=True, axis=-1)
        y = nd.batch_dot(weights, v)  # (B * nh, T, hs)
        if T > 1:
            y = y.reshape((B, nh, T, hs)).transpose((0, 2, 1, 3))
        y = y.reshape((B, T, C))
        return product(y if fill is None else y.take(fill), w_out, b_out)


class FeedForward(gluon.Block):  # type: ignore[misc, name-defined]
    def __init__(self, config: GPT2Config):
        super().__init__()
        self._gelu = gelu_tanh if config.activation == "gelu_new" else gelu
        self._hidden_map = Dense(config.hidden_size, config.units)
        self._out_map = Dense(config.units, config.hidden_size)
        self._shards: list[tuple[Any, ...]] = []

    def shard(self, n: int) -> None:
        (w, b), (w_out, b_out) = self._hidden_map.take(), self._out_map.take()
        for cut in _cuts(w.shape[0], n):
            w_out_s = nd.slice_axis(w_out, axis=1, begin=cut.start, end=cut.stop)
            self._shards.append((w[cut], b[cut], w_out_s, None if self._shards else b_out))

    def forward(self, x: Any) -> list[Any]:
        """x (B, T, C) -> parts (B, T, C) of a sum."""
        shards = self._shards or [(*self._hidden_map.data(), *self._out_map.data())]
        return [
            product(self._gelu(product(x, w, b)), w_out, b_out) for w, b, w_out, b_out in shards
        ]


def _cuts(size: int, n: int) -> list[slice]:
    n = min(n, size)  # none is empty
    edges = [i * size // n for i in range(n + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def gelu(x: Any) -> Any:
    """The exact (erf) form."""
    return nd.LeakyReLU(x, act_type="gelu")


def gelu_tanh(x: Any) -> Any:
    """Hendrycks and Gimpel's tanh approximation, `gelu_new` in Hugging Face's configurations."""
    return 0.5 * x * (1 + nd.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


class GPT2(gluon.Block):  # type: ignore[misc, name-defined]
    def __init__(self, config: GPT2Config):
        super().__init__()
        self.config = config
        C = config.units
        self._embed = nn.Embedding(config.vocab_size, C)
        self._pos_embed = nn.Embedding(config.max_length, C)
        tied = self._embed.params if config.tie_word_embeddings else None
        self._logits_proj = Dense(config.vocab_size, C, use_bias=False, params=tied)
        self._self_attention_layers = nn.Sequential()
        self._ffn_layers = nn.Sequential()
        self._attn_ln = nn.Sequential()
        self._ffn_ln = nn.Sequential()
        for i in range(config.num_layers):
            self._self_attention_layers.add(SelfAttention(config, i))
            self._ffn_layers.add(FeedForward(config))
            self._attn_ln.add(nn.LayerNorm(epsilon=config.layer_norm_eps, in_channels=C))
            self._ffn_ln.add(nn.LayerNorm(epsilon=config.layer_norm_eps, in_channels=C))
        self._final_ln = nn.LayerNorm(epsilon=config.layer_norm_eps, in_channels=C)
        self.num_shards = 1
        self._logits_blocks: list[Any] = []

    def shard(self, n: int) -> None:
        """Cuts every layer into n shards that are computed side by side; n must divide the heads.

        After the weights are set; they are kept once, so they cannot be saved any more.
        """
        for i in range(self.config.num_layers):
            self._self_attention_layers[i].shard(n)
            self._ffn_layers[i].shard(n)
        weight = self._logits_proj.weight.data()
        blocks = -(-4 * weight.size // LOGITS_BLOCK_BYTES)
        self._logits_blocks = [weight[cut] for cut in _cuts(len(weight), max(n, blocks))]
        self.num_shards = n

    def arrays(self) -> Iterator[Any]:
        """Every weight, as it lies in memory."""
        for parameter in self.collect_params().values():
            if parameter._data is not None:
                yield parameter.data()
        yield from self._logits_blocks
        for layer in (*self._self_attention_layers, *self._ffn_layers):
            for shard in layer._shards:
                yield from (array for array in shard if array is not None)

    def free(self) -> None:
        """Frees the weights now: a block is part of a reference cycle, and Python's collector does
        not see how much memory, perhaps a GPU's, hangs on it."""
        for parameter in self.collect_params().values():
            parameter._data = None
        self._logits_blocks = []
        for layer in (*self._self_attention_layers, *self._ffn_layers):
            layer._shards = []

    def forward(
        self, ids: Any, cache: ShardedKVCache | None = None, last_only: bool = False
    ) -> Any:
        """Logits (B, T, V) of the tokens that follow `ids` (B, T); (B, V) with `last_only`.

        With a cache the rows are those that `cache.select` chose, T new tokens are computed, and
        their keys and values are kept; without one, `ids` is the whole text.
        """
        B, T = ids.shape
        positions = np.broadcast_to(np.arange(T), (B, T)) if cache is None else cache.begin(T)
        ctx = ids.context
        lengths = np.repeat(positions + 1, self.config.num_heads // self.num_shards, axis=0)
        lengths = nd.array(lengths, ctx=ctx, dtype="int32")
        x = self._embed(ids) + self._pos_embed(nd.array(positions, ctx=ctx))  # (B, T, C)
        fill = None
        if T == 1 and cache is not None and ctx.device_type == "cpu" and padded(B) > B:
            fill = nd.array(np.arange(padded(B)) % B, ctx=ctx, dtype="int32")
            x = x.take(fill)
        for i in range(self.config.num_layers):
            attention, ffn = self._self_attention_layers[i], self._ffn_layers[i]
            x = nd.add_n(x, *attention(self._attn_ln[i](x), lengths, cache, i, fill))
            x = nd.add_n(x, *ffn(self._ffn_ln[i](x)))
        if cache is not None:
            cache.end(T)
        if last_only:
            x = nd.slice_axis(x, axis=1, begin=T - 1, end=T).reshape((len(x), -1))
        x = self._final_ln(x)
        if not self._logits_blocks:
            return self._logits_proj(x)[:B]
        return nd.concat(*(product(x, w) for w in self._logits_blocks), dim=-1)[:B]
