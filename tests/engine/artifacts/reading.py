"""Foreign files of weights as arrays, and the reasons why artifacts are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import MAX_MESSAGE, ArtifactError
from engine.artifacts.open import open_artifact
from engine.artifacts.read_safetensors import index_safetensors
from engine.artifacts.read_torch import index_torch
from engine.artifacts.tensor_index import Weights, map_index


def read_safetensors(path: Path) -> Weights:
    return map_index(path.parent, index_safetensors(path))


def read_torch(path: Path) -> Weights:
    return map_index(path.parent, index_torch(path))


def refused(path: Path, read: Callable[[Path], Any] = open_artifact) -> str:
    """The reason, which can be sent to a client."""
    with pytest.raises(ArtifactError) as caught:
        read(path)
    message = caught.value.message
    message.encode("utf-8")
    assert len(message) <= MAX_MESSAGE
    return message
