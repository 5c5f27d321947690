from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.engine.models import make_artifact
from tests.scripts import command

profile = partial(command.run, "profile", main=main)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "모델", vocab=160, units=64, layers=2)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_each_part_has_its_time_and_products_their_speed(model: Path, precision: str) -> None:
    options = ("--precision", precision, "--rows", "1,3", "--behind", "40")
    rows = command.output(profile("--model", model, *options)).strip().splitlines()[2:]
    cells = {r.split("|")[1].strip(): [c.strip() for c in r.split("|")[2:-1]] for r in rows}
    for part in ("products", "attention", "head", "all"):
        assert float(cells[part][2]) > 0
        assert all(cells[part])
    assert {"embedding", "rest"} < cells.keys()


def test_a_prompt_of_several_passes_has_its_time_by_part(tmp_path: Path) -> None:
    model = make_artifact(tmp_path / "모델", vocab=160, units=64, max_length=300)
    done = profile("--model", model, "--prompt", "300")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in r.split("|")[1:-1]] for r in done.stdout.splitlines()[2:]]
    times = {part: float(ms) for part, ms, _ in rows}
    assert 0 < times["attention"] <= times["all"]
    assert 0 < times["products"] <= times["all"]


def test_what_is_no_model_or_no_number_is_one_line(model: Path) -> None:
    for status, arguments, message in (
        (1, ("--model", model.parent), "model"),
        (2, ("--model", model / "없음"), f"there is no folder {model / '없음'}"),
        (2, ("--rows", "0"), "--rows"),
        (2, ("--model", model, "--behind", "5000"), "--behind is 5000, must be at most"),
        (2, ("--model", model, "--prompt", "5000"), "--prompt is 5000, must be at most"),
    ):
        assert message in command.refusal(profile(*arguments), status)
