"""Models with outliers lose no more by int8 than the models that they are made of."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from scipy.special import erf

from command.logits import divergence, logits_after
from engine import backends
from engine.artifacts import artifact as names
from engine.artifacts.adapter import read
from engine.artifacts.open import open_artifact
from engine.backends.interface import Logits
from engine.native import rotation
from engine.native.adapter import load_adapter
from testbed import hard_model, random_model
from tests.engine.adapters import make_adapter

IDS = random_model.prompts(random_model.TINY, 1, 64)[0]


def logits(folder: Path, precision: str, adapter: Path | None = None) -> Logits:
    base = open_artifact(folder)
    with contextlib.ExitStack() as opened:
        model = opened.enter_context(contextlib.closing(backends.load(base, "native", precision)))
        if adapter is None:
            return logits_after(model, IDS, len(IDS))
        low_rank = load_adapter(read(adapter), base, precision)
        opened.callback(low_rank.close)
        return logits_after(model, IDS, len(IDS), low_rank)


def lost(folder: Path, adapter: Path | None = None) -> float:
    return divergence(logits(folder, "fp32", adapter), logits(folder, "int8", adapter))


@pytest.mark.parametrize("kind", [k for k in hard_model.KINDS if k != hard_model.HEAVY_TAILS])
def test_outliers_cost_nothing(tmp_path: Path, kind: str) -> None:
    source = random_model.make(tmp_path, random_model.TINY, 0)
    same, hard = (hard_model.make(tmp_path, source, each) for each in ("unchanged", kind))
    assert 0 < lost(hard) < 1.5 * lost(same)


def test_an_adapter_is_added_in_the_basis_of_its_base(tmp_path: Path) -> None:
    """Also where channels of a head are made equal: as they are, each token is 6 nats off."""
    source = random_model.make(tmp_path, random_model.TINY, 0)
    hard = hard_model.make(tmp_path, source, "values x 100")
    adapter = make_adapter(tmp_path / "어댑터", hard, bias=True, scale=0.1)
    assert divergence(logits(hard, "fp32"), logits(hard, "fp32", adapter)) > 1
    assert 0 < lost(hard, adapter) < 0.5


@pytest.mark.parametrize("size", [0, 1e-15, 1e15])
def test_factors_are_finite_and_1_where_nothing_sticks_out(size: float) -> None:
    units = 64
    rng = np.random.default_rng(0)
    weights = {
        f"{names.QKV.format(0)}.weight": rng.standard_normal((3 * units, units), np.float32),
        f"{names.ATTENTION_OUT.format(0)}.weight": rng.standard_normal((units, units), np.float32),
        f"{names.ATTENTION_NORM.format(0)}.gamma": np.ones(units, np.float32),
    }
    weights[f"{names.QKV.format(0)}.weight"][[0, -1]] *= size
    factors = rotation.head_factors(weights, 0)
    usual = np.ones(3 * units, bool)
    usual[[0, units, -1]] = False  # a channel of the queries, with its keys, and one of the values
    assert (factors[usual] == 1).all()
    np.testing.assert_array_equal(factors[0], 1 / factors[units])
    if size:
        np.testing.assert_allclose(factors[0], size**-0.5, rtol=1)
    else:
        assert (factors == 1).all()


def test_the_mean_of_gelu_is_about_the_estimated_one() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((12, 64), np.float32) * np.linspace(0, 0.5, 12)[:, None]
    bias = np.float32(3) * rng.standard_normal(12, np.float32)
    x = rng.standard_normal((20000, 64)) @ weight.T + bias
    gelu = x * (1 + erf(x / np.sqrt(2))) / 2
    mean = rotation.mean_hidden(weight.astype(np.float32), bias)
    np.testing.assert_allclose(mean, gelu.mean(axis=0), atol=0.3)
