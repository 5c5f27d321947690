"""Holds a backend's answers against the oracle's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.parameters import Parameters
from engine import backends
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel, Piece
from engine.sampling import Sampler
from tests.engine.models import write_params
from tests.oracle.weights import Case

BACKENDS = ("mxnet", "native")
TOLERANCE = 1e-4
REPETITION_PENALTY = 1.5

Golden = Mapping[str, NDArray[Any]]


def load(case: Case, folder: Path, backend: str, precision: str = "fp32") -> BackendModel:
    """The case from an artifact's files; the tokenizer's is empty: ids go in and come out."""
    path = folder / f"{case.name}.model"
    path.mkdir(exist_ok=True)
    (path / "none.spiece").touch()
    c = case.config
    said = {
        "num_heads": c.num_heads,
        "activation": c.activation,
        "layer_norm_eps": c.layer_norm_eps,
    }
    (path / "config.json").write_text(json.dumps(said), encoding="utf-8")
    if not (path / "model.params").exists():
        write_params(path / "model.params", dict(case.weights()))
    return backends.load(open_artifact(path), backend, precision, cache_dir=folder / "prepared")


def agrees_with_oracle(model: BackendModel, golden: Golden) -> None:
    """Compare logits at each place of the prompt, cut in several ways, and both continuations."""
    ids, expected = golden["ids"], golden["logits"]
    for cuts in ([], [1], [len(ids) // 2], [len(ids) - 1], list(range(1, len(ids)))):
        edges = sorted({0, *cuts, len(ids)})
        row = model.open_row()
        for begin, end in itertools.pairwise(edges):
            logits = model.run([Piece(row, ids[begin:end].tolist(), end - begin)])
            np.testing.assert_allclose(logits, expected[begin:end], rtol=0, atol=TOLERANCE)
        model.close_row(row)

    plain, penalized = Parameters(), Parameters(repetition_penalty=REPETITION_PENALTY)
    same_ids(continuation(model, golden, "greedy", plain), golden, "greedy", "margins")
    found = continuation(model, golden, "penalized", penalized)
    same_ids(found, golden, "penalized", "penalized_margins")


def continuation(model: BackendModel, golden: Golden, name: str, parameters: Parameters) -> Any:
    """Make as many new ids as the oracle made, by prefill and cached decode steps."""
    sampler, ids = Sampler(parameters), list(golden["ids"])
    row, made = model.open_row(), list[int]()
    while len(made) < len(golden[name]):
        [logits] = model.run([Piece(row, made[-1:] or golden["ids"].tolist())])
        token, _ = sampler.choose(logits, [*ids, *made])
        made.append(token)
    model.close_row(row)
    return np.array(made)


def same_ids(found: Any, golden: Golden, name: str, margins: str) -> None:
    """Equal, as far as the oracle's own choice was no toss of a coin."""
    close = np.flatnonzero(golden[margins] < 2 * TOLERANCE)
    count = int(close[0]) if len(close) else len(golden[name])
    np.testing.assert_array_equal(found[:count], golden[name][:count])
