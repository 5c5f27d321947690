"""The chaos test finds a worker that outlives its model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.chaos.system import left_of
from tests.processes import eventually

WORKER = "5e1f-1"


def test_a_worker_that_outlives_its_unload_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "workers" / WORKER
    folder.mkdir(parents=True)
    waiting = [sys.executable, "-c", "input()", WORKER]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as worker:
        eventually(lambda: len([*left_of(tmp_path, WORKER)]) == 2)
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
        outlives = f"the folder of worker {WORKER} outlives its unload"
        assert [*left_of(tmp_path, WORKER)] == [outlives]
    folder.rmdir()
    assert not [*left_of(tmp_path, WORKER)]
