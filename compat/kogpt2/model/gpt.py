"""GPT-2 as a Gluon block that a script drives itself: `logits, states = model(ids, states)`.

Its parameters have the names of KoGPT2 v1's `.params` files. In shapes: B rows, T new tokens, P
tokens before them, C units, H heads, D their size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
from mxnet.gluon import HybridBlock, nn

MASKED = -1e18


def _from_end(F: Any, array: Any, axis: int) -> Any:
    """Return the distance of each index of an axis from the last index."""
    return F.reverse(F.contrib.arange_like(array, axis=axis), axis=0)


class GPT2SelfAttentionLayer(HybridBlock):  # type: ignore[misc]
    """Causal self-attention from (B, T, C) to (B, T, C), over the earlier tokens' states as well.

    The states are a key and a value of shape (B, H, P, D), or None without earlier tokens. The
    returned ones include the new tokens.
    """

    def __init__(self, units: int, num_heads: int, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        if units % num_heads:
            raise ValueError(f"units is {units}, must be a multiple of num_heads, {num_heads}")
        self._num_heads, self._scale = num_heads, (units // num_heads) ** -0.5
        with self.name_scope():
            self._multi_head_qkv_proj = nn.Dense(3 * units, flatten=False, in_units=units)
            self._out_proj = nn.Dense(units, flatten=False, in_units=units)
            self._attention_dropout = nn.Dropout(dropout)
            self._dropout_layer = nn.Dropout(dropout)

    def hybrid_forward(self, F: Any, data: Any, states: Any = None) -> tuple[Any, list[Any]]:
        qkv = self._multi_head_qkv_proj(data)  # (B, T, 3C)
        # (3H, B, T, D): the heads of queries, then of keys, then of values
        heads = qkv.reshape((0, 0, 3 * self._num_heads, -1)).transpose((2, 0, 1, 3))
        query, key, value = (
            part.transpose((1, 0, 2, 3)) for part in F.split(heads, num_outputs=3, axis=0)
        )  # (B, H, T, D) each
        if states is not None:
            key = F.concat(states[0], key, dim=2)
            value = F.concat(states[1], value, dim=2)
        flat = [x.reshape((-3, 0, 0)) for x in (query * self._scale, key, value)]  # (B * H, ., D)
        scores = F.batch_dot(flat[0], flat[1], transpose_b=True)  # (B * H, T, P + T)
        # A token attends to itself and the tokens before it. The last row and column are one token.
        rows = _from_end(F, scores, 1).reshape((-1, 1))
        columns = _from_end(F, scores, 2).reshape((1, -1))
        visible = F.broadcast_like(
            F.broadcast_greater_equal(columns, rows).expand_dims(0), scores, lhs_axes=0, rhs_axes=0
        )
        scores = F.where(visible, scores, F.ones_like(scores) * MASKED)
        weights = self._attention_dropout(F.softmax(scores, axis=-1))
        out = F.batch_dot(weights, flat[2]).reshape((-4, -1, self._num_heads, 0, 0))
        out = out.transpose((0, 2, 1, 3)).reshape((0, 0, -3))  # (B, T, C)
        return self._dropout_layer(self._out_proj(out)), [key, value]


class GPT2FFNLayer(HybridBlock):  # type: ignore[misc]
    """Feed-forward layer from (B, T, C) to (B, T, C), with the exact (erf) GELU."""

    def __init__(self, units: int, hidden_size: int, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        with self.name_scope():
            self._hidden_map = nn.Dense(hidden_size, flatten=False, in_units=units)
            self._out_map = nn.Dense(units, flatten=False, in_units=hidden_size)
            self._dropout_layer = nn.Dropout(dropout)

    def hybrid_forward(self, F: Any, data: Any) -> Any:
        hidden = F.LeakyReLU(self._hidden_map(data), act_type="gelu")
        return self._dropout_layer(self._out_map(hidden))


class GPT2Model(HybridBlock):  # type: ignore[misc]
    def __init__(
        self,
        units: int,
        vocab_size: int,
        max_length: int,
        num_layers: int,
        num_heads: int,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._max_length, self._num_layers = max_length, num_layers
        with self.name_scope():
            self._pos_embed = nn.Embedding(max_length, units)
            self._embed = nn.Embedding(vocab_size, units)
            self._drop = nn.Dropout(dropout)
            self._logits_proj = nn.Dense(  # tied to the embedding
                vocab_size,
                use_bias=False,
                flatten=False,
                in_units=units,
                params=self._embed.params,
            )
            self._self_attention_layers = nn.HybridSequential()
            self._ffn_layers = nn.HybridSequential()
            self._attn_ln = nn.HybridSequential()
            self._ffn_ln = nn.HybridSequential()
            for _ in range(num_layers):
                self._self_attention_layers.add(GPT2SelfAttentionLayer(units, num_heads, dropout))
                self._ffn_layers.add(GPT2FFNLayer(units, 4 * units, dropout))
                self._attn_ln.add(nn.LayerNorm(in_channels=units))
                self._ffn_ln.add(nn.LayerNorm(in_channels=units))
            self._final_ln = nn.LayerNorm(in_channels=units)

    def hybrid_forward(
        self, F: Any, data: Any, states: Sequence[Any] | None = None
    ) -> tuple[Any, list[Any]]:
        """Map ids (B, T) to logits (B, T, V) and states, a key and value (B, H, P + T, D) a layer.

        `states` are those that the call for the preceding tokens returned, or None.
        """
        new = F.contrib.arange_like(data, axis=1)
        everything = new
        if states is not None:
            everything = F.concat(F.contrib.arange_like(states[0], axis=2), new, dim=0)
        if F is mx.nd and everything.shape[0] > self._max_length:
            raise ValueError(f"{everything.shape[0]} tokens, must be at most {self._max_length}")
        # The new tokens have the last T positions.
        backwards = _from_end(F, everything, 0)
        positions = F.reverse(F.slice_like(backwards, new, axes=(0,)), axis=0)
        out = F.broadcast_add(self._embed(data), self._pos_embed(positions).expand_dims(0))
        out = self._drop(out)
        new_states: list[Any] = []
        for i in range(self._num_layers):
            before = None if states is None else [states[2 * i], states[2 * i + 1]]
            attended, after = self._self_attention_layers[i](self._attn_ln[i](out), before)
            out = out + attended
            out = out + self._ffn_layers[i](self._ffn_ln[i](out))
            new_states.extend(after)
        return self._logits_proj(self._final_ln(out)), new_states

    def load_parameters(
        self, filename: Any, ctx: Any = None, *arguments: Any, **options: Any
    ) -> None:
        """Load parameters as Gluon's block does, and also from half-precision files."""
        if not arguments:
            options.setdefault("cast_dtype", True)
        super().load_parameters(filename, ctx, *arguments, **options)

    def state_info(self, *arguments: Any, **options: Any) -> None:
        """Return None, which gluonnlp's samplers use as the initial states."""
        return
