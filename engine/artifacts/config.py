"""The shape of a GPT-2."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("gelu", "gelu_new")


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a pre-LayerNorm GPT-2.

    `activation` is `gelu` (erf) for KoGPT2 v1 and often `gelu_new` (tanh) for Hugging Face models.
    The flags are those of Hugging Face's GPT2Config; KoGPT2 has their defaults. Where
    `tie_word_embeddings` is true the output projection is the embedding.
    """

    vocab_size: int
    units: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_length: int = 1024
    activation: str = "gelu"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    @property
    def head_size(self) -> int:
        return self.units // self.num_heads

    def attention_scale(self, layer: int) -> float:
        """The factor of the products of queries and keys before the softmax."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 keys and values of one token in all layers."""
        return 2 * self.num_layers * self.units * 4

    @property
    def num_parameters(self) -> int:
        units, hidden = self.units, self.hidden_size
        norms, products = 4 * units, 4 * units * (units + 1)  # qkv and attention's output
        products += hidden * (units + 1) + units * (hidden + 1)
        tables = self.vocab_size * (1 if self.tie_word_embeddings else 2) + self.max_length
        return tables * units + self.num_layers * (norms + products) + 2 * units


KOGPT2 = GPT2Config(50_000, 768, 12, 12, 3072)
