"""Adapters (LoRA) as PEFT writes them, and the whole models that they make of their bases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from command.model_writer import write_safetensors
from engine.artifacts.adapter import BASE_NAMES, PRODUCTS, read
from engine.artifacts.artifact import shapes
from engine.artifacts.merged import merge
from engine.artifacts.open import open_artifact
from tests.engine.hugging_face import write_json
from tests.engine.models import write_params

ALL = tuple(PRODUCTS)


def make_adapter(
    path: Path,
    base: Path,
    *,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    scale: float = 2.0,
    bias: bool = False,
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
    weights: dict[str, NDArray[Any]] | None = None,
) -> Path:
    """Writes an adapter of the model in `base` and returns its folder.

    `config` holds further fields of `adapter_config.json`, `weights` further tensors. The matrices
    are large enough to change greedy text.
    """
    path.mkdir(parents=True, exist_ok=True)
    config_of_base = open_artifact(base).config
    base_shapes = dict(shapes(config_of_base))
    rng = np.random.default_rng(1000 + seed)
    tensors: dict[str, NDArray[Any]] = {}
    for layer in range(config_of_base.num_layers) if layers is None else layers:
        for module in modules:
            n, k = base_shapes[f"{BASE_NAMES[PRODUCTS[module]].format(layer)}.weight"]
            at = f"base_model.model.transformer.h.{layer}.{module}"
            down = rng.standard_normal((rank, k)) / np.sqrt(k)
            up = rng.standard_normal((n, rank)) / np.sqrt(rank)
            tensors[f"{at}.lora_A.weight"] = down.astype(dtype)
            tensors[f"{at}.lora_B.weight"] = up.astype(dtype)
            if bias:
                tensors[f"{at}.bias"] = rng.standard_normal(n).astype(dtype) * 0.3
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": list(modules),
        "fan_in_fan_out": True,
        "bias": "lora_only" if bias else "none",
        **(config or {}),
    }
    write_json(path / "adapter_config.json", fields)
    write_safetensors(path / "adapter_model.safetensors", (tensors | (weights or {})).items())
    return path


def merged(path: Path, base: Path, adapter: Path) -> Path:
    """A whole v1 model: `base`, itself a v1 model, with an adapter merged into it."""
    path.mkdir(parents=True, exist_ok=True)
    write_params(path / "kogpt2.params", merge(open_artifact(base), read(adapter)).weights)
    for file in ("kogpt2.spiece", "config.json"):
        (path / file).write_bytes((base / file).read_bytes())
    return path
