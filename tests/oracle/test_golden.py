"""The backends give the logits and the continuations of Hugging Face's GPT-2.

Those of small models are kept as goldens; those of KoGPT2's own shape are made by the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine.backends.interface import Piece
from tests.lazy import mx, mxnet_model
from tests.oracle import oracle
from tests.oracle.comparison import BACKENDS, TOLERANCE, Golden, agrees_with_oracle, load
from tests.oracle.weights import CASES, WHOLE, Case

HERE = Path(__file__).parent


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def golden(case: Case) -> Iterator[Golden]:
    with np.load(HERE / f"{case.name}.npz") as file:
        yield file


def test_the_uncached_model_gives_the_logits_of_the_oracle(case: Case, golden: Golden) -> None:
    model = mxnet_model.GPT2(case.config, dict(case.weights()))
    logits = model(mx.nd.array(golden["ids"][None, :])).asnumpy()[0]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_gives_the_logits_and_the_continuation_of_the_oracle(
    case: Case, golden: Golden, backend: str, tmp_path: Path
) -> None:
    with closing(load(case, tmp_path, backend)) as model:
        agrees_with_oracle(model, golden)


def test_int8_is_close_to_the_oracle(case: Case, golden: Golden, tmp_path: Path) -> None:
    model, ids = load(case, tmp_path, "native", "int8"), golden["ids"].tolist()
    found = model.run([Piece(model.open_row(), ids, len(ids))]).copy()
    model.close()
    error = np.square(found - golden["logits"]).mean()
    assert error < 0.1**2 * np.square(golden["logits"]).mean()


@pytest.mark.oracle
@pytest.mark.slow
def test_backends_agree_with_the_oracle_on_the_shape_of_kogpt2(tmp_path: Path) -> None:
    oracle.run("-m", "tests.oracle.make_golden", tmp_path)
    for backend in BACKENDS:
        golden = np.load(tmp_path / f"{WHOLE.name}.npz")
        with closing(load(WHOLE, tmp_path, backend)) as model, golden:
            agrees_with_oracle(model, golden)
