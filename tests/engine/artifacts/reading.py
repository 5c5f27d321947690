"""Foreign files of weights as arrays, and the reasons why artifacts are refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import MAX_MESSAGE, ArtifactError
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.artifacts.read_safetensors import index_safetensors
from engine.artifacts.read_torch import index_torch
from engine.artifacts.tensor_index import Weights, map_index
from engine.prepared.manifest import directly


def read_safetensors(path: Path) -> Weights:
    return map_index(path.parent, index_safetensors(path))


def read_torch(path: Path) -> Weights:
    return map_index(path.parent, index_torch(path))


class Counted:
    """A `Run` in this process, its answers in JSON as a sandbox's; counts the calls by function."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def __call__(self, target: Any, *arguments: Any, **options: Any) -> Any:
        self.calls[target.__name__] += 1
        return json.loads(json.dumps(directly(target, *arguments, **options)))


def file_of(array: Any) -> Path:
    """The file that an array is a view of."""
    while not isinstance(array, np.memmap):
        array = array.base
    return Path(str(array.filename))


def assert_same_weights(found: Artifact, expected: Mapping[str, Any]) -> None:
    assert found.weights.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found.weights[name], weight)


def refused(path: Path, read: Callable[[Path], Any] = open_artifact) -> str:
    """The reason, which can be sent to a client."""
    with pytest.raises(ArtifactError) as caught:
        read(path)
    message = caught.value.message
    message.encode("utf-8")
    assert len(message) <= MAX_MESSAGE
    return message
