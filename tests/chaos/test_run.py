"""The server as processes, as on demand; tests/container has it as a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.short import nothing_is_lost_wrong_or_left


@pytest.mark.slow
def test_nothing_is_lost_wrong_or_left_whatever_breaks(tmp_path: Path) -> None:
    processes = ("java", "worker", "gateway", "texts", "engine", "host", "launcher")
    faults = ("store truncate", "clock", *(f"kill {name}" for name in processes))
    nothing_is_lost_wrong_or_left(tmp_path, False, *faults)
