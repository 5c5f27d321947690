"""GPT-2 in MXNet with a K/V cache: one file, read top to bottom.

In shapes: B rows, T new tokens, P cached tokens, C units, nh heads, hs head size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from engine.artifacts import artifact
from engine.artifacts.config import GPT2Config
from engine.backends.mxnet.kv_cache import ShardedKVCache
from engine.backends.mxnet.rows import padded

nd = mx.nd

# With several rows oneDNN reads a weight more than once: from the cache, if it fits there.
LOGITS_BLOCK_BYTES = 4 << 20

# The weight (out, in) and the bias (out,) of two layers, one behind the other.
Shard = tuple[Any, Any, Any, Any]


def product(x: Any, weight: Any, bias: Any = None) -> Any:  # (..., in) -> (..., out)
    """x W^T + b with W (out, in)."""
    return nd.FullyConnected(
        *((x, weight) if bias is None else (x, weight, bias)),
        num_hidden=weight.shape[0],
        no_bias=bias is None,
        flatten=False,
    )


def gelu(x: Any) -> Any:
    """The exact (erf) form."""
    return nd.LeakyReLU(x, act_type="gelu")


def gelu_tanh(x: Any) -> Any:
    """Hendrycks and Gimpel's tanh approximation, `gelu_new` in Hugging Face's configurations."""
    return 0.5 * x * (1 + nd.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


# Attention and feed-forward can be cut into shards, as Megatron-LM cuts them for several GPUs
# (Shoeybi et al. 2019): each shard has some of the heads, or some of the hidden units, and gives a
# part of the sum that the residual stream gets. MXNet computes an fp32 product of few rows on one
# core; the shards are independent, so its engine computes them side by side.


def _cuts(size: int, n: int) -> list[slice]:
    n = min(n, size)  # none is empty
    edges = [i * size // n for i in range(n + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def cut_attention(whole: Shard, n: int, scale: float) -> Iterator[Shard]:
    """The queries are scaled here, once and for all."""
    qkv, b, out, b_out = whole
    C = out.shape[0]
    for cut in _cuts(C, n):
        rows = [slice(i * C + cut.start, i * C + cut.stop) for i in range(3)]
        w_s, b_s = (np.concatenate([w[r] for r in rows]).astype(np.float32) for w in (qkv, b))
        w_s[: C // n] *= scale
        b_s[: C // n] *= scale
        yield w_s, b_s, out[:, cut], None if cut.start else b_out


def cut_feed_forward(whole: Shard, n: int) -> Iterator[Shard]:
    hidden, b, out, b_out = whole
    for cut in _cuts(len(hidden), n):
        yield hidden[cut], b[cut], out[:, cut], None if cut.start else b_out


@dataclass(frozen=True)
class Layer:
    attention_norm: str
    attention: list[Shard]
    ffn_norm: str
    ffn: list[Shard]


class GPT2:
    """`weights` are those of `engine.artifacts.artifact.shapes`, of numpy or MXNet; MXNet's own are
    used where they are.

    With `shards` every layer is cut into so many that are computed side by side; it must divide the
    heads.
    """

    def __init__(
        self, config: GPT2Config, weights: Mapping[str, Any], ctx: Any = None, shards: int = 0
    ) -> None:
        self.config, self.num_shards = config, max(shards, 1)
        self._ctx, self._sharded = ctx or mx.cpu(), shards > 0
        self._gelu = gelu_tanh if config.activation == "gelu_new" else gelu
        self._whole: dict[str, Any] = {}
        self._layers = [self._layer(weights, i) for i in range(config.num_layers)]
        for name, _ in artifact.shapes(config):
            if not (shards and name.startswith(("_self_attention_layers.", "_ffn_layers."))):
                self._keep(weights, name)
        head = artifact.EMBEDDING if config.tie_word_embeddings else artifact.OUTPUT
        self._logits = [self._whole[head]]
        if shards:
            weight = self._whole[head]
            blocks = -(-4 * weight.size // LOGITS_BLOCK_BYTES)
            self._logits = [weight[cut] for cut in _cuts(len(weight), max(shards, blocks))]

    def _layer(self, weights: Mapping[str, Any], i: int) -> Layer:
        def shard(*names: str) -> Shard:
            parts = [f"{name.format(i)}.{part}" for name in names for part in ("weight", "bias")]
            w, b, w_out, b_out = (
                weights[part] if self._sharded else self._keep(weights, part) for part in parts
            )
            return w, b, w_out, b_out

        attention = [shard(artifact.QKV, artifact.ATTENTION_OUT)]
        ffn = [shard(artifact.FFN_HIDDEN, artifact.FFN_OUT)]
        if self._sharded:
            n, scale = self.num_shards, self.config.attention_scale(i)
            attention = [self._put(*s) for s in cut_attention(attention[0], n, scale)]
            ffn = [self._put(*s) for s in cut_feed_forward(ffn[0], n)]
        return Layer(artifact.ATTENTION_NORM.format(i), attention, artifact.FFN_NORM.format(i), ffn)

    def _keep(self, weights: Mapping[str, Any], name: str) -> Any:
        if name not in self._whole:
            self._whole[name] = self._array(weights[name])
        return self._whole[name]

    def _put(self, w: Any, b: Any, w_out: Any, b_out: Any) -> Shard:
        last = None if b_out is None else self._array(b_out)
        return self._array(w), self._array(b), self._array(w_out), last

    def _array(self, value: Any) -> Any:
        if isinstance(value, nd.NDArray):
            return value
        return nd.array(value, dtype="float32", ctx=self._ctx)

    def wait(self) -> None:
        """Until every weight is there: a failure is raised here."""
        shards = itertools.chain.from_iterable((*ly.attention, *ly.ffn) for ly in self._layers)
        for array in (*self._whole.values(), *itertools.chain.from_iterable(shards)):
            if array is not None:
                array.wait_to_read()

    def __call__(
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
        x = self._embed(ids, artifact.EMBEDDING)
        x = x + self._embed(nd.array(positions, ctx=ctx), artifact.POSITIONS)  # (B, T, C)
        fill = None
        if T == 1 and cache is not None and ctx.device_type == "cpu" and padded(B) > B:
            fill = nd.array(np.arange(padded(B)) % B, ctx=ctx, dtype="int32")
            x = x.take(fill)
        for i, layer in enumerate(self._layers):
            h = self._norm(x, layer.attention_norm)
            attended = (
                self._attend(h, lengths, cache, (i, n), fill, *shard)
                for n, shard in enumerate(layer.attention)
            )
            x = nd.add_n(x, *attended)
            h = self._norm(x, layer.ffn_norm)
            x = nd.add_n(x, *(self._feed_forward(h, *shard) for shard in layer.ffn))
        if cache is not None:
            cache.end(T)
        if last_only:
            x = nd.slice_axis(x, axis=1, begin=T - 1, end=T).reshape((len(x), -1))
        x = self._norm(x, artifact.FINAL_NORM)
        logits = [product(x, w) for w in self._logits]
        return (nd.concat(*logits, dim=-1) if len(logits) > 1 else logits[0])[:B]

    def _embed(self, ids: Any, name: str) -> Any:  # (B, T) -> (B, T, C)
        table = self._whole[name]
        return nd.Embedding(ids, table, input_dim=table.shape[0], output_dim=table.shape[1])

    def _norm(self, x: Any, name: str) -> Any:
        gamma, beta = self._whole[f"{name}.gamma"], self._whole[f"{name}.beta"]
        return nd.LayerNorm(x, gamma, beta, axis=-1, eps=self.config.layer_norm_eps)

    def _feed_forward(self, x: Any, w: Any, b: Any, w_out: Any, b_out: Any) -> Any:
        """x (B, T, C) -> a part (B, T, C) of a sum."""
        return product(self._gelu(product(x, w, b)), w_out, b_out)

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
        """x (B, T, C) -> a part (B, T, C) of a sum. `place`: the layer, and which of its shards.

        lengths (B * heads of a shard, T): how many positions each query may see. With `fill`, x has
        rows more than that, to fill up a product: fill (B) says whose attention they get.
        """
        T = x.shape[1]
        hs = self.config.head_size
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
        if not self._sharded:  # otherwise the weights are scaled
            q = q * self.config.attention_scale(place[0])
        scores = nd.batch_dot(q, k, transpose_b=True)  # (B * nh, T, P + T)
        # The causal mask is a length: query i of a row with P cached tokens sees P + i + 1.
        weights = nd.softmax(scores, length=lengths, use_length=True, axis=-1)
        y = nd.batch_dot(weights, v)  # (B * nh, T, hs)
        if T > 1:
            y = y.reshape((B, nh, T, hs)).transpose((0, 2, 1, 3))
        y = y.reshape((B, T, C))
        return product(y if fill is None else y.take(fill), w_out, b_out)
