"""Cases for the oracle: a shape, random weights from a seed, and a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.artifacts.config import KOGPT2, GPT2Config
from testbed.weights import random_weights


@dataclass(frozen=True)
class Case:
    """One model and one prompt for the oracle."""

    name: str
    config: GPT2Config
    seed: int
    prompt_length: int = 16
    new_tokens: int = 24

    @property
    def ids(self) -> NDArray[np.int64]:
        """The prompt (T,)."""
        rng = np.random.default_rng([self.seed, 1])
        return rng.integers(0, self.config.vocab_size, self.prompt_length)

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        return random_weights(self.config, [self.seed, 0])


# Small ones, committed as .npz: every way in which shapes can go wrong.
CASES = (
    Case("gelu", GPT2Config(211, 48, 2, 4, 192, 64), seed=1),
    Case("gelu-new", GPT2Config(211, 48, 2, 4, 192, 64, "gelu_new"), seed=2),
    Case("one-head", GPT2Config(97, 32, 1, 1, 128, 48), seed=3),
    Case("heads-of-8", GPT2Config(150, 64, 3, 8, 256, 64, "gelu_new"), seed=4),
    Case("narrow-ffn", GPT2Config(133, 60, 2, 5, 100, 96), seed=5, prompt_length=40),
    Case("deep", GPT2Config(120, 32, 6, 2, 128, 64), seed=6),
    Case("eps", GPT2Config(101, 40, 2, 4, 160, 64, "gelu_new", 1e-3), seed=7),
    Case("whole-context", GPT2Config(89, 24, 2, 2, 96, 56), seed=8, prompt_length=32),
    Case("one-token", GPT2Config(89, 24, 2, 2, 96, 32), seed=9, prompt_length=1),
)
# Of KoGPT2's own shape, too large to be committed.
WHOLE = Case("kogpt2", KOGPT2, seed=2020, new_tokens=8)
