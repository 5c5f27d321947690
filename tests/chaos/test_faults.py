"""What a fault does, and that it is taken back."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.chaos.faults import limited

TAKES = """
import sys
for line in sys.stdin:
    try:
        print(len(bytearray(int(line) << 20)) >> 20, flush=True)
    except MemoryError:
        print("none", flush=True)
"""


def test_a_process_has_less_memory_and_then_what_it_had() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    asks, says = process.stdin, process.stdout
    assert asks is not None
    assert says is not None

    def take(mib: int) -> str:
        print(mib, file=asks, flush=True)
        return says.readline().strip()

    with process:
        assert take(100) == "100"
        with limited(psutil.Process(process.pid), 48 << 20):
            assert [take(mib) for mib in (20, 100)] == ["20", "none"]
        assert take(100) == "100"
