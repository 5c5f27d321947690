"""HAProxy as the benchmarks start it, on one processor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.fleet import haproxy
from tests.e2e.server import eventually

needs_haproxy = pytest.mark.skipif(not shutil.which("haproxy"), reason="haproxy is not installed")


class HAProxy(haproxy.HAProxy):
    """It has one thread there, which counts an answer as given before it takes the next request:
    bounded load is then what one client after another sees."""

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
        super().__init__(folder, nodes, host, [*prefix, *one])
        self.log = self._log

    def wait_for(self, *names: str) -> None:
        """Until it sends requests to these servers, and to no other."""
        eventually(lambda: self.up() == set(names))

    def stop(self) -> None:
        self.close()
