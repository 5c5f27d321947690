"""`python -m tests.chaos --image`, in short, as on SageMaker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.test_run import nothing_is_lost_wrong_or_left


@pytest.mark.container
def test_nothing_is_lost_wrong_or_left_whatever_breaks(image: str, tmp_path: Path) -> None:
    faults = ("kill engine", "store 503", "stop engine", "kill host", "kill zygote")
    nothing_is_lost_wrong_or_left(tmp_path, True, *faults, image=image)
