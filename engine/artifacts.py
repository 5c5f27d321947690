"""A model's folder: what is in it, and its weights under one set of names.

The names are those of KoGPT2 v1, Dense weights [out, in], whatever the folder holds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config import ACTIVATIONS, GPT2Config
from engine.errors import ArtifactError
from engine.params_file import read_params

Weights = dict[str, NDArray[Any]]

EMBEDDING = "_embed.weight"
POSITIONS = "_pos_embed.weight"
OUTPUT = "_logits_proj.weight"
QKV = "_self_attention_layers.{}._multi_head_qkv_proj"
ATTENTION_OUT = "_self_attention_layers.{}._out_proj"
FFN_HIDDEN = "_ffn_layers.{}._hidden_map"
FFN_OUT = "_ffn_layers.{}._out_map"
ATTENTION_NORM = "_attn_ln.{}"
FFN_NORM = "_ffn_ln.{}"
FINAL_NORM = "_final_ln"

DEFAULT_HEAD_SIZE = 64


@dataclass(frozen=True)
class Artifact:
    """A checked model folder. Its weights are mapped from disk, not read."""

    path: Path
    config: GPT2Config
    params_file: Path
    spiece_file: Path
    weights: Weights

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.config.num_parameters


def shapes(config: GPT2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter of a model with its shape; the tied output projection is not among them."""
    c = config
    yield EMBEDDING, (c.vocab_size, c.units)
    yield POSITIONS, (c.max_length, c.units)
    for i in range(c.num_layers):
        for name, out, wide in (
            (QKV, 3 * c.units, c.units),
            (ATTENTION_OUT, c.units, c.units),
            (FFN_HIDDEN, c.hidden_size, c.units),
            (FFN_OUT, c.units, c.hidden_size),
        ):
            yield f"{name.format(i)}.weight", (out, wide)
            yield f"{name.format(i)}.bias", (out,)
        for name in (ATTENTION_NORM, FFN_NORM):
            yield f"{name.format(i)}.gamma", (c.units,)
            yield f"{name.format(i)}.beta", (c.units,)
    yield f"{FINAL_NORM}.gamma", (c.units,)
    yield f"{FINAL_NORM}.beta", (c.units,)


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Checks a KoGPT2 v1 folder: `*.params`, `*.spiece` and optionally `config.json`.

    Raises `ArtifactError` that says what is missing or does not fit.
    """
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise ArtifactError(f"there is no model folder {folder}")
        params_file = _only(folder, "*.params")
        spiece_file = _only(folder, "*.spiece")
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {error.strerror}") from None
    weights = _canonical(read_params(params_file), params_file.name)
    config = _config(weights, _read_json(folder / "config.json"), params_file.name)
    _check(weights, config, params_file.name)
    return Artifact(folder, config, params_file, spiece_file, weights)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        files = ", ".join(sorted(p.name for p in folder.iterdir())[:20]) or "nothing"
        count = "no" if not found else f"{len(found)}"
        raise ArtifactError(
            f"{folder.name} holds {count} {pattern} files, must hold exactly one (found: {files})"
        )
    return found[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path.name} is not JSON: {error}") from None
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path.name} must be a JSON object")
    return value


def _canonical(weights: Weights, file: str) -> Weights:
    """Strips the prefix that all keys share (a fine-tune saved from a wrapper block)."""
    prefixes = [n.removesuffix(POSITIONS) for n in weights if n.endswith(POSITIONS)]
    fitting = [prefix for prefix in prefixes if prefix + EMBEDDING in weights]
    if not fitting:
        keys = ", ".join(list(weights)[:3]) or "none"
        raise ArtifactError(
            f"{file} has no {EMBEDDING} beside a {POSITIONS}: it is not a KoGPT2 model"
            f" (keys: {keys}, ...)"
        )
    prefix = min(fitting, key=len)
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _config(weights: Weights, given: Mapping[str, Any], file: str) -> GPT2Config:
    """Sizes from the parameters; what they cannot say (heads, activation) from config.json."""

    def first(*names: str, default: Any) -> Any:
        return next((given[n] for n in names if given.get(n) is not None), default)

    for name in (EMBEDDING, POSITIONS, FFN_HIDDEN.format(0) + ".weight"):
        if name not in weights or weights[name].ndim != 2 or not weights[name].size:
            raise ArtifactError(f"{file} has no matrix {name}")
    vocab_size, units = weights[EMBEDDING].shape
    heads = first("num_heads", "n_head", default=max(units // DEFAULT_HEAD_SIZE, 1))
    eps = first("layer_norm_eps", "layer_norm_epsilon", default=1e-5)
    activation = first("activation", "activation_function", default="gelu")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or units % heads:
        raise ArtifactError(f"config.json: num_heads is {heads!r}, must divide the {units} units")
    if activation not in ACTIVATIONS:
        raise ArtifactError(
            f"config.json: activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}"
        )
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise ArtifactError(
            f"config.json: layer_norm_eps is {eps!r}, must be a small number above 0"
        )
    config = GPT2Config(
        vocab_size=vocab_size,
        units=units,
        num_layers=_count_layers(weights),
        num_heads=heads,
        hidden_size=weights[FFN_HIDDEN.format(0) + ".weight"].shape[0],
        max_length=weights[POSITIONS].shape[0],
        activation=activation,
        layer_norm_eps=eps,
    )
    for field, names in {
        "vocab_size": ("vocab_size",),
        "units": ("units", "n_embd"),
        "num_layers": ("num_layers", "n_layer"),
        "max_length": ("max_length", "n_positions"),
    }.items():
        said = first(*names, default=getattr(config, field))
        if said != getattr(config, field):
            raise ArtifactError(
                f"config.json says {names[0]} {said!r}, but {file} has {getattr(config, field)}"
            )
    return config


def _count_layers(weights: Weights) -> int:
    """One more than the highest layer that any parameter belongs to, so that none is left out."""
    blocks = (QKV, ATTENTION_OUT, FFN_HIDDEN, FFN_OUT, ATTENTION_NORM, FFN_NORM)
    pattern = re.compile("|".join(re.escape(b).replace(r"\{\}", r"(\d{1,4})") for b in blocks))
    found = (pattern.match(name) for name in weights)
    return 1 + max(int(m[m.lastindex or 0]) for m in found if m)


def _check(weights: Weights, config: GPT2Config, file: str) -> None:
    expected = dict(shapes(config))
    for name, shape in expected.items():
        if name not in weights:
            raise ArtifactError(f"{file} lacks {name}")
        if weights[name].shape != shape:
            raise ArtifactError(f"{file}: {name} is {weights[name].shape}, must be {shape}")
        if weights[name].dtype not in (np.float16, np.float32):
            raise ArtifactError(
                f"{file}: {name} is {weights[name].dtype}, must be float16 or float32"
            )
    # v1 files carry the tied output projection a second time.
    if OUTPUT in weights and weights[OUTPUT].shape != expected[EMBEDDING]:
        raise ArtifactError(
            f"{file}: {OUTPUT} does not have the shape of the embedding it is tied to"
        )
    for name in set(weights) - set(expected):
        del weights[name]
