"""A worker that outlives its model is found; a process has less memory for a while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.chaos.faults import limited
from tests.chaos.system import left_of
from tests.processes import eventually

WORKER = "5e1f-1"
ALLOCATES = """
import sys
for line in sys.stdin:
    try:
        print(len(bytearray(int(line) << 20)) >> 20, flush=True)
    except MemoryError:
        print("none", flush=True)
"""


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


def test_a_process_has_less_memory_and_then_what_it_had() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ALLOCATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def allocate(mib: int) -> str:
        print(mib, file=requests, flush=True)
        return answers.readline().strip()

    with process:
        assert allocate(100) == "100"
        with limited(psutil.Process(process.pid), 48 << 20):
            assert [allocate(mib) for mib in (20, 100)] == ["20", "none"]
        assert allocate(100) == "100"
