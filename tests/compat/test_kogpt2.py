"""The `kogpt2` package that scripts import, against the engine's own GPT-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handlers.user_code.module import COMPAT
from tests.engine.engines import uncached_model
from tests.engine.models import make_artifact
from tests.lazy import mx

SIZES: dict[str, int] = {"units": 96, "num_heads": 3, "num_layers": 3, "max_length": 64}
VOCAB = 300


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a model of the package with the parameters of an artifact."""
    cpu = mx.cpu()  # `kogpt2` imports MXNet itself, so common.mxnet_compat comes first
    monkeypatch.syspath_prepend(COMPAT)
    from kogpt2.model.gpt import GPT2Model

    def loaded(path: Path) -> Any:
        model = GPT2Model(vocab_size=VOCAB, dropout=0.1, **SIZES)
        model.load_parameters(str(path / "kogpt2.params"), ctx=cpu)
        return model

    return loaded


def artifact(path: Path, **changes: Any) -> Path:
    return make_artifact(
        path, layers=3, units=96, heads=3, vocab=VOCAB, max_length=64, seed=4, **changes
    )


def ids(rows: int, length: int) -> Any:
    rng = np.random.default_rng(length)
    return mx.nd.array(rng.integers(0, VOCAB, (rows, length)))


@pytest.mark.parametrize("hybridized", [False, True])
def test_logits_are_the_engines(load: Any, tmp_path: Path, hybridized: bool) -> None:
    path = artifact(tmp_path)
    model, engine = load(path), uncached_model(path)
    if hybridized:
        model.hybridize()
    for rows, length in ((1, 1), (1, 7), (3, 20), (2, 64)):
        tokens = ids(rows, length)
        np.testing.assert_allclose(
            model(tokens)[0].asnumpy(), engine(tokens).asnumpy(), atol=2e-5, rtol=1e-5
        )


def test_states_carry_what_came_before(load: Any, tmp_path: Path) -> None:
    model = load(artifact(tmp_path))
    tokens = ids(2, 30)
    whole = model(tokens)[0].asnumpy()
    states, parts = None, []
    for start, stop in ((0, 12), (12, 13), (13, 30)):
        logits, states = model(tokens[:, start:stop], states)
        assert len(states) == 2 * SIZES["num_layers"]
        assert states[0].shape == (2, 3, stop, 32)
        parts.append(logits.asnumpy())
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5, rtol=1e-5)


def test_half_precision_files_load(load: Any, tmp_path: Path) -> None:
    half = load(artifact(tmp_path / "half", dtype="float16"))
    full = load(artifact(tmp_path / "full"))
    tokens = ids(1, 10)
    np.testing.assert_allclose(half(tokens)[0].asnumpy(), full(tokens)[0].asnumpy(), atol=0.05)


def test_too_many_tokens_are_refused(load: Any, tmp_path: Path) -> None:
    model = load(artifact(tmp_path))
    with pytest.raises(ValueError, match="65 tokens, must be at most 64"):
        model(ids(1, 65))
