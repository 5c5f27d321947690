"""The backends against Hugging Face's GPT-2 itself, on shapes chosen at random and on KoGPT2's own.

ORACLE_PYTHON names the interpreter of an environment made from requirements/oracle.txt:

    ORACLE_PYTHON=.venv-oracle/bin/python .venv/bin/python -m pytest -m oracle tests/oracle
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine.artifacts.config import GPT2Config
from tests.oracle.comparison import BACKENDS, agrees_with_oracle, load
from tests.oracle.weights import Case, write_cases

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).parents[2]
RANDOM_CASES = 6
SEED = os.environ.get("ORACLE_SEED", "1")  # another one gives other shapes
ORACLE_TIMEOUT_S = 300


def oracle(cases: list[Case], folder: Path) -> None:
    """Has the oracle write an answer per case into `folder`."""
    interpreter = os.environ.get("ORACLE_PYTHON")
    if not interpreter:
        pytest.fail(
            "ORACLE_PYTHON must name the Python of an environment with torch and transformers"
            " (requirements/oracle.txt); .ci/run makes one and sets it"
        )
    write_cases(cases, folder / "cases.json")
    command = [str(Path(interpreter).absolute()), "-m", "tests.oracle.make_golden"]
    command += ["--cases", str(folder / "cases.json"), "--out", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=ORACLE_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr


def random_case(index: int, rng: random.Random) -> Case:
    heads = rng.randint(1, 6)
    units = heads * rng.choice((4, 8, 10, 16, 32))
    prompt_length = rng.randint(1, 60)
    return Case(
        name=f"random-{index}",
        config=GPT2Config(
            vocab_size=rng.randint(50, 700),
            units=units,
            num_layers=rng.randint(1, 5),
            num_heads=heads,
            hidden_size=rng.randint(units, 5 * units),
            max_length=rng.randint(prompt_length + 24, 128),
            activation=rng.choice(("gelu", "gelu_new")),
        ),
        seed=rng.randrange(1 << 32),
        prompt_length=prompt_length,
    )


def test_backends_agree_with_the_oracle_on_shapes_chosen_at_random(tmp_path: Path) -> None:
    rng = random.Random(SEED)  # noqa: S311
    cases = [random_case(i, rng) for i in range(RANDOM_CASES)]

    oracle(cases, tmp_path)

    for case in cases:
        print(case)
        for backend in BACKENDS:
            check(case, tmp_path, backend)


@pytest.mark.slow
def test_backends_agree_with_the_oracle_on_the_shape_of_kogpt2(tmp_path: Path) -> None:
    case = Case("kogpt2", GPT2Config(50_000, 768, 12, 12, 3072, 1024), seed=2020)

    oracle([case], tmp_path)

    for backend in BACKENDS:
        check(case, tmp_path, backend)


def check(case: Case, folder: Path, backend: str) -> None:
    model = load(case, folder, backend)
    try:
        with np.load(folder / f"{case.name}.npz") as golden:
            agrees_with_oracle(model, golden)
    finally:
        model.close()
