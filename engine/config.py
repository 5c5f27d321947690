"""The shape of a GPT-2."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("gelu", "gelu_new")


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a pre-LayerNorm GPT-2 whose output projection is its embedding.

    `activation` is `gelu` (erf) for KoGPT2 v1 and often `gelu_new` (tanh) for Hugging Face models.
    """

    vocab_size: int
    units: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_length: int = 1024
    activation: str = "gelu"
    layer_norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.units // self.num_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 keys and values that one token keeps in all layers."""
        return 2 * self.num_layers * self.units * 4

    @property
    def num_parameters(self) -> int:
        per_layer = (
            4 * self.units
            + 3 * self.units * (self.units + 1)
            + self.units * (self.units + 1)
            + self.hidden_size * (self.units + 1)
            + self.units * (self.hidden_size + 1)
        )
        embeddings = (self.vocab_size + self.max_length) * self.units
        return embeddings + self.num_layers * per_layer + 2 * self.units
