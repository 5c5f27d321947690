"""Foreign files of weights as arrays."""

from __future__ import annotations

from pathlib import Path

from engine.artifacts.read_safetensors import index_safetensors
from engine.artifacts.read_torch import index_torch
from engine.artifacts.tensor_index import Weights, map_index


def read_safetensors(path: Path) -> Weights:
    return map_index(path.parent, index_safetensors(path))


def read_torch(path: Path) -> Weights:
    return map_index(path.parent, index_torch(path))
