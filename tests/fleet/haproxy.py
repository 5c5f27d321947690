"""The real HAProxy with the configuration of deploy/haproxy, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import REPOSITORY, eventually, free_port

CONFIGURATION = REPOSITORY / "deploy" / "haproxy" / "haproxy.cfg"
BINARY = shutil.which("haproxy")
needs_haproxy = pytest.mark.skipif(not BINARY, reason="haproxy is not installed")


class HAProxy:
    """In front of servers on loopback, at these ports; `node1` is the first."""

    def __init__(self, folder: Path, nodes: Sequence[int]) -> None:
        assert BINARY
        self.nodes = nodes
        self.port, self._inside = free_port(), free_port()
        self.log = folder / "haproxy.log"
        environment = {"BIND": f"127.0.0.1:{self.port}", "INSIDE": f"127.0.0.1:{self._inside}"}
        for number, node in enumerate(nodes, 1):
            environment[f"NODE{number}"] = f"127.0.0.1:{node}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [BINARY, "-db", "-f", CONFIGURATION],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=_on_one_processor,
            )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def up(self) -> set[str]:
        """Names of the servers that it sends requests to."""
        assert self.process.poll() is None, self.log.read_text("utf-8")
        try:
            answer = requests.get(f"http://127.0.0.1:{self._inside}/metrics", timeout=60)
        except requests.ConnectionError:
            return set()
        return {
            sample.labels["server"]
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == "haproxy_server_status"
            and sample.labels["state"] == "UP"
            and sample.value
        }

    def wait_for(self, *names: str) -> None:
        """Until it sends requests to these servers, and to no other."""
        eventually(lambda: self.up() == set(names))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def _on_one_processor() -> None:
    """It has one thread there, which counts an answer as given before it takes the next request:
    bounded load is then what one client after another sees."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
