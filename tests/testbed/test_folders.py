from __future__ import annotations

from pathlib import Path

import pytest

from testbed.folders import building


def test_a_folder_that_is_not_completed_is_missing_and_is_made_anew(tmp_path: Path) -> None:
    target = tmp_path / "모델" / "봄"
    with pytest.raises(FileNotFoundError), building(target) as folder:
        (folder / "half").rename(folder / "missing" / "half")
    assert not target.exists()
    with building(target) as folder:
        (folder / "whole").touch()
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert [*target.parent.iterdir()] == [target]
