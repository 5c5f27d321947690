"""Hosts with a network namespace, an address and a control group each, on one bridge."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.control_group import NAME as GROUP
from testbed.control_group import ROOT as CONTROL_GROUPS
from testbed.control_group import ControlGroup
from testbed.process import ProgramError

PREFIX = "kogpt2-fleet-"  # and the id of the process that made it
NAMESPACES = Path("/run/netns")
NET = ipaddress.ip_network("198.18.0.0/15")  # for such tests (RFC 2544)
MEMORY_MIB, CPUS = 1024, 1.0
# A narrow line: 0.1 s for a full packet, up to 0.4 s in its queue, and 1% of the packets lost. Not
# every kernel has netem.
QUEUE = "tbf rate 120kbit burst 1600 latency 400ms"
LOSS = "-m statistic --mode random --probability 0.01"


def _missing() -> str:
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    tools = [tool for tool in ("ip", "tc", "iptables", "nsenter") if not shutil.which(tool)]
    if tools:
        return f"not installed: {', '.join(tools)}"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(_missing()), reason=_missing())


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


class Host:
    """`prefix` before a command runs it there; that of `limited` in the control group, too."""

    def __init__(self, namespace: str, address: str) -> None:
        self.address, self._namespace = address, namespace
        self.prefix = ["nsenter", f"--net={NAMESPACES / namespace}"]

    @contextlib.contextmanager
    def limited(self) -> Iterator[list[str]]:
        with contextlib.ExitStack() as stack:
            inside: list[str] = []
            with contextlib.suppress(ProgramError):  # its message says no more than that
                group = ControlGroup(MEMORY_MIB, cpus=CPUS, seen=True)
                inside = stack.enter_context(group).prefix
            yield [*self.prefix, *inside]

    @contextlib.contextmanager
    def parted_from(self, address: str, port: int | None = None) -> Iterator[None]:
        """Drops packets from and to an address."""
        ways = (("INPUT", "-s", "--sport"), ("OUTPUT", "-d", "--dport"))
        for chain, end, port_of in ways:
            where = ["-p", "tcp", port_of, str(port)] if port else []
            self._iptables("-A", chain, end, address, *where, "-j", "DROP")
        try:
            yield
        finally:
            self._iptables("-F")

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        self._iptables("-A", "INPUT", *LOSS.split(), "-j", "DROP")
        run(*self.prefix, *["tc", "qdisc", "add", "dev", "eth0", "root"], *QUEUE.split())
        try:
            yield
        finally:
            run(*self.prefix, *["tc", "qdisc", "del", "dev", "eth0", "root"])
            self._iptables("-F")

    def _iptables(self, *words: str) -> None:
        run(*self.prefix, "iptables", "-w", "20", *words)


class Network:
    """A context manager. This process has `address` in it."""

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        subnets = 2 ** (28 - NET.prefixlen)
        first = int(NET.network_address) + os.getpid() % subnets * 16
        self._addresses = map(str, ipaddress.ip_network((first, 28)).hosts())
        self.address = next(self._addresses)

    def __enter__(self) -> Network:
        remove_left()
        bridge = f"{self._prefix}bridge"
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge", "up")
        link = f"kogpt2-{os.getpid()}"
        self._connect(link, "us")
        run("ip", "address", "add", f"{self.address}/28", "dev", link)
        run("ip", "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        _remove(os.getpid())

    def host(self, name: str) -> Host:
        namespace, address = f"{self._prefix}{name}", next(self._addresses)
        run("ip", "netns", "add", namespace)
        self._connect("eth0", name, namespace)
        run("ip", "-n", namespace, "address", "add", f"{address}/28", "dev", "eth0")
        for link in ("lo", "eth0"):
            run("ip", "-n", namespace, "link", "set", link, "up")
        return Host(namespace, address)

    def _connect(self, link: str, name: str, namespace: str = "") -> None:
        """Connects a namespace to the bridge by a pair of links."""
        bridge, there = f"{self._prefix}bridge", ["-n", namespace] if namespace else []
        ends = ["link", "add", link, "type", "veth", "peer", "name", name, "netns", bridge]
        run("ip", *there, *ends)
        run("ip", "-n", bridge, "link", "set", "dev", name, "master", "bridge", "up")


def remove_left() -> None:
    """Removes the namespaces and groups of killed tests."""
    found = NAMESPACES.glob(f"{PREFIX}*") if NAMESPACES.is_dir() else ()
    for pid in {int(path.name.removeprefix(PREFIX).partition("-")[0]) for path in found}:
        if not psutil.pid_exists(pid):
            _remove(pid)
            for place in (f"*/{GROUP}{pid}-*", f"{GROUP}{pid}-*"):
                for group in CONTROL_GROUPS.glob(place):
                    group.rmdir()


def _remove(pid: int) -> None:
    """Removes the namespaces of a process, and ends what runs in them."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}{pid}-*")):
        ended = []
        for inside in map(int, run("ip", "netns", "pids", path.name).split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(inside)
                process.kill()
                ended.append(process)
        psutil.wait_procs(ended, 10)
        run("ip", "netns", "del", path.name)
    # The other links go with their namespaces.
    subprocess.run(["ip", "link", "del", f"kogpt2-{pid}"], capture_output=True)
