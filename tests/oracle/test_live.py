"""The backends against Hugging Face's GPT-2 itself, on random shapes and on KoGPT2's own."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine.artifacts.config import GPT2Config
from tests.oracle import oracle
from tests.oracle.comparison import BACKENDS, agrees_with_oracle, load
from tests.oracle.weights import Case, write_cases

pytestmark = pytest.mark.oracle

RANDOM_CASES = 6
SEED = os.environ.get("ORACLE_SEED", "1")  # another one gives other shapes


def random_case(index: int, rng: random.Random) -> Case:
    heads = rng.randint(1, 6)
    units = heads * rng.choice((4, 8, 10, 16, 32))
    length = rng.randint(1, 60)
    config = GPT2Config(
        vocab_size=rng.randint(50, 700),
        units=units,
        num_layers=rng.randint(1, 5),
        num_heads=heads,
        hidden_size=rng.randint(units, 5 * units),
        max_length=rng.randint(length + 24, 128),
        activation=rng.choice(("gelu", "gelu_new")),
    )
    return Case(f"random-{index}", config, seed=rng.randrange(1 << 32), prompt_length=length)


def check(cases: list[Case], folder: Path) -> None:
    write_cases(cases, folder / "cases.json")
    oracle.run("-m", "tests.oracle.make_golden", folder / "cases.json", folder)
    for case in cases:
        print(case)
        for backend in BACKENDS:
            golden = np.load(folder / f"{case.name}.npz")
            with closing(load(case, folder, backend)) as model, golden:
                agrees_with_oracle(model, golden)


def test_backends_agree_with_the_oracle_on_random_shapes(tmp_path: Path) -> None:
    rng = random.Random(SEED)  # noqa: S311
    check([random_case(i, rng) for i in range(RANDOM_CASES)], tmp_path)


@pytest.mark.slow
def test_backends_agree_with_the_oracle_on_the_shape_of_kogpt2(tmp_path: Path) -> None:
    config = GPT2Config(50_000, 768, 12, 12, 3072, 1024)
    check([Case("kogpt2", config, seed=2020, new_tokens=8)], tmp_path)
