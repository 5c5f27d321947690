"""Listening sockets, in a network namespace with settings of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import REPOSITORY

IPV4_TO_ALL = """
import pathlib, socket
from serving.process.ports import listen
pathlib.Path("/proc/sys/net/ipv6/bindv6only").write_text("1")
print("set", flush=True)
listener = listen("::", 0)
print("IPv6 only:", listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))
"""


def test_all_addresses_are_those_of_ipv4_too_whatever_the_default_is() -> None:
    command = ["unshare", "--net", sys.executable, "-c", IPV4_TO_ALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if "set" not in done.stdout:
        pytest.skip(f"a network namespace cannot be made or set: {done.stderr.strip()[-200:]}")
    assert done.stdout.split("\n")[1:] == ["IPv6 only: 0", ""], done.stderr
