"""Random classifiers of KoGPT2's shape: a whole one, and adapters with heads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from command.documents import write_json
from command.model_writer import write_adapter
from common.model_files import ADAPTER, WEIGHT_FILES
from engine.artifacts.adapter import WEIGHT_FILES as ADAPTER_FILES
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import read_json
from testbed import random_model
from testbed.folders import building

LABELS = ("부정", "긍정")
ARCHITECTURE = "GPT2ForSequenceClassification"
HEAD = "score.weight"


def make(trunk: Path, target: Path) -> Path:
    """Write a classifier with the weights of a model in Hugging Face's form, unless it exists."""
    if target.exists():
        return target
    config = {
        **read_json(trunk / "config.json"),
        "architectures": [ARCHITECTURE],
        "id2label": {str(i): label for i, label in enumerate(LABELS)},
        "label2id": {label: i for i, label in enumerate(LABELS)},
        "pad_token_id": random_model.SPECIAL.index("<pad>"),
    }
    with building(target) as new:
        shutil.copytree(trunk, new, dirs_exist_ok=True)
        file = new / WEIGHT_FILES[0]
        weights = load_file(file)
        weights[HEAD] = _head(weights["transformer.ln_f.weight"].size, 0)
        save_file(weights, file, {"format": "pt"})
        write_json(new / "config.json", config)
    return target


def make_adapter(base: Path, target: Path, config: GPT2Config, seed: int, rank: int = 16) -> Path:
    """Write an adapter of a base beside it, with a head of its own, unless it exists."""
    if target.exists():
        return target
    with building(target) as new:
        write_adapter(new, base.name, random_model.low_rank(config, rank, seed), rank)
        file = new / ADAPTER_FILES[0]
        save_file(load_file(file) | {f"base_model.model.{HEAD}": _head(config.units, seed)}, file)
        write_json(new / ADAPTER, {**read_json(new / ADAPTER), "task_type": "SEQ_CLS"})
    return target


def _head(units: int, seed: int) -> NDArray[np.float32]:
    """Return the weights (labels, units) of a head."""
    rng = np.random.default_rng([seed, 1])
    return np.float32(0.1) * rng.standard_normal((len(LABELS), units), np.float32)
