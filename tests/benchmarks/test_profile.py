from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.engine.models import make_artifact
from tests.scripts import command

profile = partial(command.run, "profile", main=main)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_each_part_has_its_time_and_products_their_speed(tmp_path: Path, precision: str) -> None:
    model = make_artifact(tmp_path / "모델", vocab=160, units=64, layers=2)
    done = profile(
        "--model", str(model), "--precision", precision, "--rows", "1,3", "--behind", "40"
    )
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.strip().splitlines()
    assert [*map(str.strip, head.split("|"))][2:6] == [
        "1 row, 40 tokens behind: ms",
        "GB/s",
        "3 rows, 40 tokens behind: ms",
        "GB/s",
    ]
    cells = {r.split("|")[1].strip(): [c.strip() for c in r.split("|")[2:-1]] for r in rows}
    for part in ("products", "attention", "head", "all"):
        assert float(cells[part][2]) > 0
        assert all(cells[part])
    assert {"embedding", "rest"} < cells.keys()


def test_what_is_no_model_or_no_number_is_one_line(tmp_path: Path) -> None:
    done = profile("--model", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "*.params" in done.stderr or "model" in done.stderr
    assert profile("--rows", "0").returncode == 2
    model = make_artifact(tmp_path / "모델", vocab=160, units=64, layers=2)
    done = profile("--model", str(model), "--behind", "5000")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--behind is 5000, must be at most" in done.stderr
