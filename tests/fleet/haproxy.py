"""The real HAProxy with the configuration of deploy/haproxy, in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import REPOSITORY, eventually, free_port

CONFIGURATION = REPOSITORY / "deploy" / "haproxy" / "haproxy.cfg"
BINARY = shutil.which("haproxy")
needs_haproxy = pytest.mark.skipif(not BINARY, reason="haproxy is not installed")


class HAProxy:
    """In front of servers, HOST:PORT each; `node1` is the first. `prefix` is a command that becomes
    it, where it has the address `host`."""

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        assert BINARY
        self.host, self.port, self._inside = host, free_port(), free_port()
        self.log, self._file = folder / "haproxy.log", folder / "haproxy.cfg"
        environment = {"BIND": f"{host}:{self.port}", "INSIDE": f"{host}:{self._inside}"}
        for number, node in enumerate(nodes, 1):
            environment[f"NODE{number}"] = node
        self._configure(range(1, 4))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, BINARY, "-W", "-db", "-f", self._file],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=_on_one_processor,
            )

    def _configure(self, nodes: Iterable[int]) -> None:
        """As deployed, with the lines of these servers."""
        text = CONFIGURATION.read_text("utf-8")
        lines = re.findall(r"^  server node\d .*\n", text, re.MULTILINE)
        made = [lines[0].replace("1", str(number)) for number in nodes]
        self._file.write_text(text.replace("".join(lines), "".join(made)), "utf-8")

    def reload(self, *nodes: int) -> None:
        """Returns once it has begun with a configuration that has these servers."""
        loaded = lambda: self.log.read_text("utf-8").count("Loading success")  # noqa: E731
        eventually(loaded)
        before = loaded()
        self._configure(nodes)
        self.process.send_signal(signal.SIGUSR2)
        eventually(lambda: loaded() > before)

    def url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def up(self) -> set[str]:
        """Names of the servers that it sends requests to."""
        assert self.process.poll() is None, self.log.read_text("utf-8")
        try:
            answer = requests.get(f"http://{self.host}:{self._inside}/metrics", timeout=60)
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
        self.process.terminate()
        self.process.wait()


def _on_one_processor() -> None:
    """It has one thread there, which counts an answer as given before it takes the next request:
    bounded load is then what one client after another sees."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
