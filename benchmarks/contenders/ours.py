"""Contender: one of our backends, driven as the engine drives it, without the engine around it."""

from __future__ import annotations

import sys
from functools import partial
from importlib import metadata

import numpy as np

from benchmarks.worker import Channel, Clock, generation
from engine import backends
from engine.artifacts.artifact import POSITIONS
from engine.artifacts.open import open_artifact
from engine.artifacts.tensor_index import Weights
from engine.backends.interface import BackendModel
from engine.backends.onnx.quantize import block_size


def generate(
    model: BackendModel, prompts: list[list[int]], new_tokens: int, clock: Clock
) -> list[list[int]]:
    """Greedy, all prompts in one batch. A clock's step for all prompts, and for each step."""
    made = [[int(model.extend(model.add_row(), np.array(ids)).argmax())] for ids in prompts]
    clock.step()
    for _ in range(new_tokens - 1):
        rows = model.decode(np.array([ids[-1] for ids in made]))
        for ids, token in zip(made, rows.argmax(axis=1).tolist(), strict=True):
            ids.append(token)
        clock.step()
    for _ in prompts:
        model.remove_last_row()
    return made


def unread_bytes(weights: Weights, backend: str, precision: str) -> int:
    """Of the weights in memory, what no decode step reads."""
    if backend == "mxnet":
        return 4 * weights[POSITIONS].size  # a row of them only
    if not precision.startswith("int8"):
        return 0
    # onnxruntime packs the scales with the numbers, and is given them by themselves, too.
    matrices = [w for name, w in weights.items() if w.ndim == 2 and name != POSITIONS]
    return sum(4 * w.size // block_size(w.shape[1]) for w in matrices)


def main() -> None:
    folder, backend, precision = sys.argv[1:]
    artifact = open_artifact(folder)
    model = backends.load(artifact, backend, precision)
    about = {
        "version": f"{backend} {metadata.version(backend)}",
        "weight_bytes": model.weight_bytes,
        "step_bytes": model.weight_bytes - unread_bytes(artifact.weights, backend, precision),
    }
    Channel().serve(about, {"generate": generation(partial(generate, model))})


if __name__ == "__main__":
    main()
