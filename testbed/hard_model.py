"""Models that are hard to quantize: they have the outliers of models trained on much text.

Demo models and random ones have none, so int8 loses little of them whatever its format. All but
`heavy tails` compute what the model they are made of computes, with other numbers on the way.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from command.documents import write_json
from command.model_writer import write_params
from engine.artifacts import artifact as names
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from testbed.folders import building

Weights = dict[str, NDArray[np.float32]]  # by the names of `engine.artifacts.artifact`
Change = Callable[[Weights, int, GPT2Config, np.random.Generator], None]  # changes one layer

FORMAT = 1  # increase when the written files change
CHANNELS = 3  # of each LayerNorm, or of the values of each layer
UNITS = 2  # hidden units with a large constant
BLOCK = 32  # hidden units are added in whole blocks, which llama.cpp's Q8_0 needs
LARGE = 50.0
HEAVY_SHARE, HEAVY = 0.001, 13.0


def make(workdir: Path, source: Path, kind: str) -> Path:
    """Write a hard model of `KINDS`, made of an artifact, unless it exists; return its folder.

    It has the tanh form of GELU, whatever the source has: llama.cpp knows no other.
    """
    folder = workdir / f"{source.name}-{kind.replace(' ', '-')}-v{FORMAT}"
    if folder.is_dir():
        return folder
    artifact = open_artifact(source)
    weights = {name: np.array(w, np.float32) for name, w in artifact.weights.items()}
    rng = np.random.default_rng(7)
    for layer in range(artifact.config.num_layers):
        KINDS[kind](weights, layer, artifact.config, rng)
    described = {"num_heads": artifact.config.num_heads, "activation": "gelu_new"}
    with building(folder) as new:
        write_params(new / "kogpt2.params", weights.items(), "float32")
        shutil.copyfile(artifact.tokenizer_file, new / "kogpt2.spiece")
        write_json(new / "config.json", described)
    return folder


def _same(weights: Weights, layer: int, config: GPT2Config, rng: np.random.Generator) -> None:
    """Change nothing."""


def _norms(
    factor: float, weights: Weights, layer: int, config: GPT2Config, rng: np.random.Generator
) -> None:
    """Multiply channels of both LayerNorms; divide the columns behind them."""
    pairs = (names.ATTENTION_NORM, names.QKV), (names.FFN_NORM, names.FFN_HIDDEN)
    for norm, product in pairs:
        channels = rng.choice(config.units, CHANNELS, replace=False)
        for kind in ("gamma", "beta"):
            weights[f"{norm.format(layer)}.{kind}"][channels] *= factor
        weights[f"{product.format(layer)}.weight"][:, channels] /= factor


def _values(
    factor: float, weights: Weights, layer: int, config: GPT2Config, rng: np.random.Generator
) -> None:
    """Multiply channels of attention's values; divide the columns of `attention_out`."""
    channels = rng.choice(config.units, CHANNELS, replace=False)
    for kind in ("weight", "bias"):
        weights[f"{names.QKV.format(layer)}.{kind}"][2 * config.units + channels] *= factor
    weights[f"{names.ATTENTION_OUT.format(layer)}.weight"][:, channels] /= factor


def _hidden(weights: Weights, layer: int, config: GPT2Config, rng: np.random.Generator) -> None:
    """Add hidden units that are `LARGE` for every token; take their effect back in the bias.

    The units that were in their place move to the end, into a further block.
    """
    hidden, out = names.FFN_HIDDEN.format(layer), names.FFN_OUT.format(layer)
    at = rng.choice(config.hidden_size, UNITS, replace=False)
    before, bias, after = (
        weights[name] for name in (f"{hidden}.weight", f"{hidden}.bias", f"{out}.weight")
    )
    before = np.pad(before, ((0, BLOCK), (0, 0)))
    bias = np.pad(bias, (0, BLOCK))
    after = np.pad(after, ((0, 0), (0, BLOCK)))
    end = slice(config.hidden_size, config.hidden_size + UNITS)
    before[end], bias[end], after[:, end] = before[at], bias[at], after[:, at]
    before[at], bias[at] = 0, LARGE  # and their columns in `after` stay
    weights |= {f"{hidden}.weight": before, f"{hidden}.bias": bias, f"{out}.weight": after}
    weights[f"{out}.bias"] -= LARGE * after[:, at].sum(axis=1)


def _heavy(weights: Weights, layer: int, config: GPT2Config, rng: np.random.Generator) -> None:
    """Multiply single weights of all products, which makes another model."""
    for product in names.PRODUCTS.values():
        weight = weights[f"{product.format(layer)}.weight"]
        weight[rng.random(weight.shape) < HEAVY_SHARE] *= HEAVY


HEAVY_TAILS = "heavy tails"
KINDS: dict[str, Change] = {
    "unchanged": _same,
    "LayerNorm x 8": partial(_norms, 8),
    "LayerNorm x 30": partial(_norms, 30),
    "LayerNorm x 100": partial(_norms, 100),
    "values x 100": partial(_values, 100),
    "hidden units of 50": _hidden,
    HEAVY_TAILS: _heavy,
}
