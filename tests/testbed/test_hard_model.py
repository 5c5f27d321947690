"""Hard models compute what their source computes, with outliers on the way."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from command.logits import logits_after
from engine import backends
from engine.artifacts import artifact as names
from engine.artifacts.open import open_artifact
from engine.backends.interface import Logits
from testbed import hard_model, random_model
from testbed.hard_model import HEAVY_TAILS, KINDS

IDS = random_model.prompts(random_model.TINY, 1, 32)[0]
# A number of each kind that is this many times as large as in the source.
LARGER = {
    "LayerNorm x 8": (names.ATTENTION_NORM.format(0) + ".gamma", 4),
    "LayerNorm x 30": (names.FFN_NORM.format(1) + ".gamma", 15),
    "LayerNorm x 100": (names.FFN_NORM.format(0) + ".beta", 20),
    "values x 100": (names.QKV.format(1) + ".weight", 30),
    "hidden units of 50": (names.FFN_HIDDEN.format(1) + ".bias", 100),
    HEAVY_TAILS: (names.FFN_OUT.format(0) + ".weight", 2.5),
}


def logits(folder: Path) -> Logits:
    with contextlib.closing(backends.load(open_artifact(folder), "native", "fp32")) as model:
        return logits_after(model, IDS, len(IDS))


def off(exact: Logits, other: Logits) -> float:
    """The largest difference, against the deviation of the exact logits."""
    return float(np.abs(exact - other).max() / exact.std())


def largest(folder: Path, name: str) -> float:
    return float(np.abs(open_artifact(folder).weights[name]).max())


@pytest.mark.parametrize("kind", LARGER)
def test_a_hard_model_computes_what_its_source_computes(tmp_path: Path, kind: str) -> None:
    source = random_model.make(tmp_path, random_model.TINY, 0)
    same, hard = (hard_model.make(tmp_path, source, each) for each in ("unchanged", kind))
    name, times = LARGER[kind]
    assert largest(hard, name) > times * largest(same, name)
    if kind == HEAVY_TAILS:
        assert off(logits(same), logits(hard)) > 0.01
    else:
        assert off(logits(same), logits(hard)) < 1e-3


def test_every_kind_is_compared_with_its_source() -> None:
    assert {"unchanged", *LARGER} == set(KINDS)


def test_only_gelu_is_of_another_form(tmp_path: Path) -> None:
    """llama.cpp knows the tanh form alone; it differs from the other by 0.0005 at most."""
    source = random_model.make(tmp_path, random_model.TINY, 0)
    same = hard_model.make(tmp_path, source, "unchanged")
    assert open_artifact(same).config.activation == "gelu_new"
    assert off(logits(source), logits(same)) < 0.02


def test_large_hidden_units_are_in_the_place_of_others(tmp_path: Path) -> None:
    """In a block of their own they would leave the scales of the others as they were."""
    source = random_model.make(tmp_path, random_model.TINY, 0)
    hard = open_artifact(hard_model.make(tmp_path, source, "hidden units of 50"))
    hidden = random_model.TINY.hidden_size
    assert hard.config.hidden_size == hidden + hard_model.BLOCK
    for layer in range(hard.config.num_layers):
        bias = hard.weights[names.FFN_HIDDEN.format(layer) + ".bias"]
        (at,) = np.nonzero(bias == hard_model.LARGE)
        assert len(at) == hard_model.UNITS
        assert at.max() < hidden
