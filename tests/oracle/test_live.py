"""The backends against Hugging Face's GPT-2 itself, on KoGPT2's own shape."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine.artifacts.config import GPT2Config
from tests.oracle import oracle
from tests.oracle.comparison import BACKENDS, agrees_with_oracle, load
from tests.oracle.weights import Case, write_cases

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


def test_backends_agree_with_the_oracle_on_the_shape_of_kogpt2(tmp_path: Path) -> None:
    config = GPT2Config(50_000, 768, 12, 12, 3072, 1024)
    case = Case("kogpt2", config, seed=2020, new_tokens=8)
    write_cases([case], tmp_path / "cases.json")
    oracle.run("-m", "tests.oracle.make_golden", tmp_path / "cases.json", tmp_path)
    for backend in BACKENDS:
        golden = np.load(tmp_path / "kogpt2.npz")
        with closing(load(case, tmp_path, backend)) as model, golden:
            agrees_with_oracle(model, golden)
