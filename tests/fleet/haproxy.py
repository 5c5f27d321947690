"""HAProxy as the benchmarks start it, on one processor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from testbed import haproxy
from tests.e2e.server import eventually

needs_haproxy = pytest.mark.skipif(not shutil.which("haproxy"), reason="haproxy is not installed")


class HAProxy(haproxy.HAProxy):
    """It has one thread there, which counts an answer as given before it takes the next request:
    bounded load is then what one client after another sees."""

    def __init__(self, *arguments: Any, prefix: Sequence[str] = (), **options: Any) -> None:
        one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
        super().__init__(*arguments, prefix=[*prefix, *one], **options)
        self.log = self._log

    def wait_for(self, *names: str) -> None:
        """Until it sends requests to these servers, and to no other."""
        eventually(lambda: self.up() == set(names))

    def stop(self) -> None:
        self.close()
