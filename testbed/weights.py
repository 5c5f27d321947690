"""Random weights of a GPT-2, the same in every environment that has numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.artifacts.artifact import EMBEDDING, OUTPUT, POSITIONS, shapes
from engine.artifacts.config import GPT2Config

# Standard deviations for logits of a few units, attention to more than one token, and greedy text
# that does not repeat a token forever.
LOGITS_STD = 3.0
GAIN = 1.5
SMALL = 0.1


def random_weights(
    config: GPT2Config, seed: int | Sequence[int]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (name in `engine.artifacts.artifact`, array) pairs; Dense weights are (out, in)."""
    rng = np.random.default_rng(seed)
    for name, shape in shapes(config):
        w = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith(".gamma"):
            w = 1 + np.float32(SMALL) * w
        elif name in (EMBEDDING, POSITIONS, OUTPUT):
            w *= np.float32(LOGITS_STD / np.sqrt(config.units))
        elif name.endswith(".weight"):
            w *= np.float32(GAIN / np.sqrt(shape[1]))
        else:
            w *= np.float32(SMALL)
        yield name, w
