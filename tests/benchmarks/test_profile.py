from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.engine.models import make_artifact
from tests.scripts import command


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command.run("profile", *arguments)


@pytest.mark.parametrize(
    ("precision", "product"), [("int8", "Int8MatMul 160x64"), ("fp32", "FusedMatMul 160x64")]
)
def test_each_operator_has_its_time_and_each_product_its_speed(
    tmp_path: Path, precision: str, product: str
) -> None:
    model = make_artifact(tmp_path / "모델", vocab=160, units=64, layers=2)
    done = profile("--model", str(model), "--precision", precision, "--rows", "1,3")
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.strip().splitlines()
    assert [*map(str.strip, head.split("|"))][2:6] == ["1 row: ms", "GB/s", "GMAC/s", "3 rows: ms"]
    cells = {r.split("|")[1].strip(): [c.strip() for c in r.split("|")[2:-1]] for r in rows}
    assert float(cells[product][0]) > 0
    assert len([cell for cell in cells[product] if cell]) == 6
    assert cells["LayerNormalization"][1:3] == ["", ""]
    parts = sum(float(cell[0]) for name, cell in cells.items() if name != "all")
    assert float(cells["all"][0]) == pytest.approx(parts, rel=0.5)


def test_what_is_no_model_or_no_number_is_one_line(tmp_path: Path) -> None:
    done = profile("--model", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "*.params" in done.stderr or "model" in done.stderr
    assert profile("--rows", "0").returncode == 2
