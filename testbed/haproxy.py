"""The real HAProxy with the configuration of deploy/haproxy."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from testbed.process import ROOT, Program, ProgramError, fetch, free_port

CONFIGURATION = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
RELOAD_S = 60.0


class HAProxy(Program):
    """HAProxy in front of servers, HOST:PORT each.

    `node1` is the first, and the first three are on the ring. `prefix`: a command that starts
    HAProxy where it has the address `host`.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        program = shutil.which("haproxy")
        if program is None:
            raise ProgramError("haproxy is not installed")
        self.host, self.port, self._inside = host, free_port(), free_port()
        self._file = folder / "haproxy.cfg"
        environment = {"BIND": f"{host}:{self.port}", "INSIDE": f"{host}:{self._inside}"}
        environment |= {f"NODE{number}": node for number, node in enumerate(nodes, 1)}
        self._configure(range(1, len(nodes[:3]) + 1))
        command: list[Path | str] = [*prefix, program, "-W", "-db", "-f", self._file]
        super().__init__(command, folder / "haproxy.log", environment)
        self._wait(lambda: self._loads() and self.up())

    def _configure(self, nodes: Iterable[int]) -> None:
        """As deployed, with the lines of these servers."""
        text = CONFIGURATION.read_text("utf-8")
        lines = re.findall(r"^  server node\d .*\n", text, re.MULTILINE)
        made = [lines[0].replace("1", str(number)) for number in nodes]
        self._file.write_text(text.replace("".join(lines), "".join(made)), "utf-8")

    def reload(self, *nodes: int) -> None:
        """Has it read its configuration again, with these servers; returns once it has."""
        before, begun = self._loads(), time.monotonic()
        self._configure(nodes)
        while self._loads() == before:
            if time.monotonic() > begun + RELOAD_S:
                raise self._failure("did not load its configuration again")
            # Again and again: a signal is lost on it while it begins.
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(0.5)

    def _loads(self) -> int:
        return self._log.read_text("utf-8").count("Loading success")

    def url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def up(self) -> set[str]:
        """Names of the servers that it sends requests to."""
        try:
            text = fetch(f"http://{self.host}:{self._inside}/metrics", 60).decode()
        except OSError:
            return set()
        status = r'^haproxy_server_status\{proxy="kogpt2",server="(\w+)",state="UP"\} 1'
        return set(re.findall(status, text, re.MULTILINE))
