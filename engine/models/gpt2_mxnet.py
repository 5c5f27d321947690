"""GPT-2 in Gluon with a K/V cache: one file, read top to bottom.

Parameter names are those of KoGPT2 v1's `.params` files (`_embed.weight`,
`_self_attention_layers.0._multi_head_qkv_proj.weight`, ...), so `load_parameters` and
`save_parameters` speak that format.

In shapes: B rows, T new tokens, P cached tokens, C units, nh heads, hs head size, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from engine.config import GPT2Config
from engine.mxnet_compat import mx

nd, gluon, nn = mx.nd, mx.gluon, mx.gluon.nn


class Dense(gluon.Block):  # type: ignore[misc, name-defined]
    """y = x W^T + b with W (out, in).

    MXNet computes an fp32 product of few rows on one core. `split(n)` cuts W into n row blocks
    (views, no copy) whose products the n threads of MXNet's engine compute side by side.
    """

    def __init__(self, out_units: int, in_units: int, use_bias: bool = True, params: Any = None):
        super().__init__(params=params)
        self._out_units = out_units
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(out_units, in_units))
            self.bias = (
                self.params.get("bias", shape=(out_units,), init="zeros") if use_bias else None
            )
        self._blocks: list[tuple[Any, Any]] = []

    def split(self, n: int) -> None:
        weight = self.weight.data()
        bias = self.bias.data() if self.bias is not None else None
        edges = [round(i * self._out_units / n) for i in range(n + 1)]
        self._blocks = [
            (weight[a:b], bias[a:b] if bias is not None else None)
            for a, b in itertools.pairwise(edges)
            if b > a
        ]

    def forward(self, x: Any) -> Any:  # (..., in) -> (..., out)
        blocks = self._blocks or [
            (self.weight.data(), self.bias.data() if self.bias is not None else None)
        ]
        parts = [
            nd.FullyConnected(x, w, b, num_hidden=w.shape[0], no_bias=b is None, flatten=False)
            for w, b in blocks
        ]
        return parts[0] if len(parts) == 1 else nd.concat(*parts, dim=-1)


class SelfAttention(gluon.Block):  # type: ignore[misc, name-defined]
    def __init__(self, config: GPT2Config):
        super().__init__()
        self._heads, self._head_size = config.num_heads, config.head_size
        self._multi_head_qkv_proj = Dense(3 * config.units, config.units)
        self._out_proj = Dense(config.units, config.units)

    def forward(self, x: Any, lengths: Any, cache: KVCache | None, layer: int) -> Any:
        """x (B, T, C); lengths (B * nh, T): how many positions each query may see."""
        B, T, C = x.shape
        nh, hs = self._heads, self._head_size
        qkv = self._multi_head_qkv_proj(x)  # (B, T, 3C): q, k, v, heads inside each
        q, k, v = (
            nd.slice_axis(qkv, axis=-1, begin=i * C, end=(i + 1) * C)
            .reshape((B, T, nh, hs))
            .transpose((0, 2, 1, 3))
            .reshape((B * nh, T, hs))
            for i in range(3)
        )
        if cache is not None:
            k, v = cache.update(layer, k, v)  # (B * nh, capacity, hs)
        scores = nd.batch_dot(q * hs**-0.5, k, transpose_b=True)  # (B * nh, T, P + T)
        # The causal mask is a length: query i of a row with P cached tokens sees P + i + 1.
        weights = nd.softmax(scores, length=lengths, use_length=True, axis=-1)
        y = nd.batch_dot(weights, v)  # (B * nh, T, hs)
        y = y.reshape((B, nh, T, hs)).transpose((0, 2, 1, 3)).reshape((B, T, C))
        return self._out_proj(y)


class FeedForward(gluon.Block):  # type: ignore[misc, name-defined]
    def __init__(self, config: GPT2Config):
        super().__init__()
        self._tanh = config.activation == "gelu_new"
        self._hidden_map = Dense(config.hidden_size, config.units)
        self._out_map = Dense(config.units, config.hidden_size)

    def forward(self, x: Any) -> Any:
        return self._out_map(gelu_tanh(self._hidden_map(x)) if self._tanh else self._erf(x))

    def _erf(self, x: Any) -> Any:
        return nd.LeakyReLU(self._hidden_map(x), act_type="gelu")


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
        self._logits_proj = Dense(config.vocab_size, C, use_bias=False, params=self._embed.params)
        self._self_attention_layers = nn.Sequential()
        self._ffn_layers = nn.Sequential()
        self._attn_ln = nn.Sequential()
        self._ffn_ln = nn.Sequential()
        for _ in range(config.num_layers):
            self._self_attention_layers.add(SelfAttention(config))
            self._ffn_layers.add(FeedForward(config))
            self._attn_ln.add(nn.LayerNorm(epsilon=config.layer_norm_eps, in_channels=C))
            self._ffn_ln.add(nn.LayerNorm(epsilon=config.layer_norm_eps, in_channels=C))
        self._final_ln = nn.LayerNorm(epsilon=config.layer_norm_eps, in_channels=C)

    def split(self, n: int) -> None:
        """Computes each projection as n products side by side; after the weights are set."""
        self.apply(lambda block: block.split(n) if isinstance(block, Dense) else None)

    def forward(self, ids: Any, cache: KVCache | None = None, last_only: bool = False) -> Any:
        """Logits (B, T, V) of the tokens that follow `ids` (B, T); (B, V) with `last_only`.

        With a cache the rows are those that `cache.select` chose, T new tokens are computed, and
        their keys and values are kept; without one, `ids` is the whole text.
        """
        B, T = ids.shape
        positions = np.broadcast_to(np.arange(T), (B, T)) if cache is None else cache.begin(T)
        ctx = ids.context
        lengths = np.repeat(positions + 1, self.config.num_heads, axis=0)
        lengths = nd.array(lengths, ctx=ctx, dtype="int32")  # (B * nh, T)
        x = self._embed(ids) + self._pos_embed(nd.array(positions, ctx=ctx))  # (B, T, C)
        for i in range(self.config.num_layers):
            x = x + self._self_attention_layers[i](self._attn_ln[i](x), lengths, cache, i)
            x = x + self._ffn_layers[i](self._ffn_ln[i](x))
        if cache is not None:
            cache.end(T)
        if last_only:
            x = nd.slice_axis(x, axis=1, begin=T - 1, end=T).reshape((B, -1))
        return self._logits_proj(self._final_ln(x))


class KVCache:
    """Keys and values of the rows of one batch, each row with its own length.

    Per layer two arrays (rows, nh, capacity, hs), grown in blocks of `BLOCK` positions and to the
    next power of two of rows. What lies beyond a row's length is masked, not cleared.
    """

    BLOCK = 64

    def __init__(self, config: GPT2Config, ctx: Any):
        self.config, self._ctx = config, ctx
        self.lengths: list[int] = []
        self._rows = self._capacity = 0
        self._layers: list[tuple[Any, Any]] = []
        self._selected = slice(0, 0)
        self._write: Any = None

    @property
    def num_bytes(self) -> int:
        return self._rows * self._capacity * self.config.kv_bytes_per_token

    def add_row(self) -> int:
        """Opens an empty row behind the others and returns its index."""
        self.lengths.append(0)
        return len(self.lengths) - 1

    def move_row(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is."""
        for keys, values in self._layers:
            keys[target] = keys[source]
            values[target] = values[source]
        self.lengths[target] = self.lengths[source]

    def remove_last_row(self) -> None:
        self.lengths.pop()
        if not self.lengths:
            self._layers, self._rows, self._capacity = [], 0, 0

    def select(self, begin: int, end: int) -> None:
        """The next forward pass is about rows begin..end-1."""
        self._selected = slice(begin, end)

    def begin(self, T: int) -> np.ndarray[Any, Any]:
        """Makes room for T tokens in each selected row; returns their positions (B, T)."""
        lengths = np.array(self.lengths[self._selected], dtype=np.int64)
        self._grow(len(self.lengths), int(lengths.max()) + T)
        nh = self.config.num_heads
        positions: np.ndarray[Any, Any] = lengths[:, None] + np.arange(T)  # (B, T)
        rows = np.arange(self._selected.start * nh, self._selected.stop * nh)
        at = np.stack([np.repeat(rows, T), np.repeat(positions, nh, axis=0).ravel()])
        self._write = nd.array(at, ctx=self._ctx, dtype="int32")  # (2, B * nh * T)
        return positions

    def update(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Stores k and v (B * nh, T, hs) at their positions; returns all keys and values."""
        nh, hs, rows = self.config.num_heads, self.config.head_size, self._selected
        found = []
        for stored, new in zip(self._layers[layer], (k, v), strict=True):
            flat = stored.reshape((self._rows * nh, self._capacity, hs))
            nd._internal._scatter_set_nd(
                lhs=flat, rhs=new.reshape((-1, hs)), indices=self._write, shape=flat.shape, out=flat
            )
            found.append(flat[rows.start * nh : rows.stop * nh])
        return found[0], found[1]

    def end(self, T: int) -> None:
        for row in range(self._selected.start, self._selected.stop):
            self.lengths[row] += T

    def _grow(self, rows: int, length: int) -> None:
        if rows <= self._rows and length <= self._capacity:
            return
        rows = max(self._rows, 1 << (rows - 1).bit_length())
        blocks = -(-length // self.BLOCK)
        capacity = min(max(self._capacity, blocks * self.BLOCK), self.config.max_length)
        c = self.config
        shape = (rows, c.num_heads, capacity, c.head_size)
        kept = (self._rows, self._capacity)
        old = self._layers
        self._layers = []
        for layer in range(c.num_layers):
            new = tuple(nd.zeros(shape, ctx=self._ctx) for _ in range(2))
            if old:
                for target, source in zip(new, old[layer], strict=True):
                    target[: kept[0], :, : kept[1]] = source
                del source  # a layer's old arrays go before the next layer's new ones come
                old[layer] = (None, None)
            self._layers.append((new[0], new[1]))
        self._rows, self._capacity = rows, capacity
