"""A proxy in front of servers, and the real HAProxy with the configuration of deploy/haproxy."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from testbed.process import ROOT, Program, ProgramError, fetch, free_port

CONFIGURATION = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
ROUTES_S = 60.0  # limit for a proxy to notice a change of its servers


class Proxy(Program):
    """A proxy in front of servers: `nodes`, HOST:PORT each, named `node1`, `node2`, ...

    `prefix` precedes the command, such as to start it in the network namespace of `host`.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        self.host, self.port, self._inside = host, free_port(), free_port()
        self._folder = folder
        command, environment = self._command(nodes)
        log = folder / f"{type(self).__name__.lower()}.log"
        super().__init__([*prefix, *command], log, environment)
        self._wait(self.up)

    def _command(self, nodes: Sequence[str]) -> tuple[list[Path | str], Mapping[str, str]]:
        """Write the configuration; return the command and its environment."""
        raise NotImplementedError

    def up(self) -> set[str]:
        """Return the names of the servers that the proxy sends requests to."""
        raise NotImplementedError

    def in_flight(self) -> int:
        """Return the number of requests in flight to all servers, as bounded load counts them."""
        raise NotImplementedError

    def url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def wait_for(self, *names: str) -> None:
        """Wait until the proxy sends requests to these servers only."""
        self._until(lambda: self.up() == set(names), f"does not route to {names} alone", ROUTES_S)


class HAProxy(Proxy):
    """HAProxy as deployed; the first three nodes are on its hash ring."""

    def _command(self, nodes: Sequence[str]) -> tuple[list[Path | str], Mapping[str, str]]:
        program = shutil.which("haproxy")
        if program is None:
            raise ProgramError("haproxy is not installed")
        environment = {"BIND": f"{self.host}:{self.port}", "INSIDE": f"{self.host}:{self._inside}"}
        environment |= {f"NODE{number}": node for number, node in enumerate(nodes, 1)}
        file = self._configure(range(1, len(nodes[:3]) + 1))
        return [program, "-W", "-db", "-f", file], environment

    def _configure(self, nodes: Iterable[int]) -> Path:
        """Write the deployed configuration with server lines for the nodes of these numbers."""
        text = CONFIGURATION.read_text("utf-8")
        lines = re.findall(r"^  server node\d .*\n", text, re.MULTILINE)
        made = [lines[0].replace("1", str(number)) for number in nodes]
        file = self._folder / "haproxy.cfg"
        file.write_text(text.replace("".join(lines), "".join(made)), "utf-8")
        return file

    def reload(self, *nodes: int) -> None:
        """Reload the configuration with the nodes of these numbers; return once it is active."""
        before = self._loads()
        self._configure(nodes)

        def reloaded() -> bool:
            # Repeated, because HAProxy loses a signal that arrives while it starts.
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(0.5)
            # A late signal of the previous reload may have loaded the previous file.
            names = {f"node{number}" for number in nodes}
            return self._loads() != before and self._servers(r"\d") == names

        self._until(reloaded, "did not load its configuration again", ROUTES_S)

    def _loads(self) -> int:
        return self.log.read_text("utf-8").count("Loading success")

    def up(self) -> set[str]:
        return self._servers("1")

    def in_flight(self) -> int:
        sessions = r'^haproxy_server_current_sessions\{proxy="kogpt2",.*\} (\d+)'
        return sum(map(int, re.findall(sessions, self._metrics(), re.MULTILINE)))

    def _servers(self, is_up: str) -> set[str]:
        """Return the names of the servers whose metric of the state UP matches `is_up`, a regex."""
        if not self._loads():
            return set()
        try:
            text = self._metrics()
        except OSError:
            return set()
        status = r'^haproxy_server_status\{proxy="kogpt2",server="(\w+)",state="UP"\} '
        return set(re.findall(status + is_up, text, re.MULTILINE))

    def _metrics(self) -> str:
        return fetch(f"http://{self.host}:{self._inside}/metrics", 60).decode()
