"""The onnxruntime backend against the MXNet one, and the rows of a batch against single runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.artifacts import open_artifact
from engine.backends import onnx_backend
from engine.backends.onnx_backend import MAX_ROWS, PAGE, KVCache, OnnxModel
from engine.errors import InvalidRequest, OutOfMemory, PromptTooLong
from tests.engine.models import make_artifact

Load = Callable[..., OnnxModel]
PRECISIONS = ("fp32", "int8")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Loads a small model; the same one for the same arguments, all closed at the end."""
    folder = tmp_path_factory.mktemp("models")
    loaded: list[OnnxModel] = []

    def load_one(precision: str, **sizes: object) -> OnnxModel:
        name = "-".join(f"{key}{value}" for key, value in sizes.items()) or "default"
        if not (folder / name).exists():
            make_artifact(folder / name, **sizes)  # type: ignore[arg-type]
        model = onnx_backend.load(
            open_artifact(folder / name), precision, cache_dir=folder / "cache"
        )
        loaded.append(model)
        return model

    yield load_one
    for model in loaded:
        model.close()


def prompt(length: int, seed: int = 0, vocab: int = 500) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length)


def single(model: OnnxModel, prompt_ids: np.ndarray, *more: int) -> list[np.ndarray]:
    """The logits after the prompt and after each further id, in a batch of one."""
    assert model.add_row() == 0
    logits = [model.extend(0, prompt_ids).copy()]
    logits += [model.decode(np.array([token]))[0].copy() for token in more]
    model.remove_last_row()
    return logits


def greedy(model: object, prompt_ids: np.ndarray, steps: int) -> list[int]:
    model.add_row()  # type: ignore[attr-defined]
    tokens = [int(model.extend(0, prompt_ids).argmax())]  # type: ignore[attr-defined]
    while len(tokens) < steps:
        tokens.append(int(model.decode(np.array(tokens[-1:]))[0].argmax()))  # type: ignore[attr-defined]
    model.remove_last_row()  # type: ignore[attr-defined]
    return tokens


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"activation": "gelu_new"},
        {"dtype": "float16"},
        {"units": 192, "heads": 4, "prefix": "kogpt2."},  # heads of 48
        {"units": 60, "heads": 6, "layers": 1},  # heads of 10, widths that no block divides
    ],
    ids=str,
)
def test_fp32_equals_the_mxnet_backend(load: Load, sizes: dict[str, object]) -> None:
    mxnet_backend = pytest.importorskip("engine.backends.mxnet_backend")
    model = load("fp32", **sizes)
    name = "-".join(f"{key}{value}" for key, value in sizes.items()) or "default"
    folder = Path(model_folder(load)) / name
    reference = mxnet_backend.load(open_artifact(folder))
    try:
        reference.add_row()
        ids, more = prompt(9), prompt(8, seed=1)
        expected = [reference.extend(0, ids), *(reference.decode(np.array([t]))[0] for t in more)]
        reference.remove_last_row()
        for ours, theirs in zip(single(model, ids, *more), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
        assert greedy(model, ids, 64) == greedy(reference, ids, 64)
    finally:
        reference.close()
