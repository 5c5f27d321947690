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
from engine.backends.interface import BackendModel


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


def main() -> None:
    folder, backend, precision = sys.argv[1:]
    artifact = open_artifact(folder)
    model = backends.load(artifact, backend, precision)
    # Of its positions, which are of onnxruntime's no weights, mxnet reads a row.
    unread = 4 * artifact.weights[POSITIONS].size if backend == "mxnet" else 0
    about = {
        "version": f"{backend} {metadata.version(backend)}",
        "weight_bytes": model.weight_bytes,
        "step_bytes": model.weight_bytes - unread,
    }
    Channel().serve(about, {"generate": generation(partial(generate, model))})


if __name__ == "__main__":
    main()
