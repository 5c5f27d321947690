"""HAProxy as the benchmarks start it, on one processor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from testbed import haproxy

needs_haproxy = pytest.mark.skipif(not shutil.which("haproxy"), reason="haproxy is not installed")


class HAProxy(haproxy.HAProxy):
    """It has one thread there, which counts an answer as given before it takes the next request:
    bounded load is then what one client after another sees."""

    def _command(self, nodes: Sequence[str]) -> tuple[list[Path | str], Mapping[str, str]]:
        command, environment = super()._command(nodes)
        return ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command], environment
