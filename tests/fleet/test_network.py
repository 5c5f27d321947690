"""Namespaces of killed tests are removed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fleet.network import (
    NAMESPACES,
    PREFIX,
    Network,
    control_groups,
    needs_namespaces,
    remove_left,
)
from tests.processes import has_ended

pytestmark = [needs_namespaces, pytest.mark.slow]

MAKER = """
import subprocess, time
from tests.fleet.network import Network
network = Network().__enter__()
with network.host("node").limited() as prefix:
    print(subprocess.Popen([*prefix, "sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""


def test_only_namespaces_of_killed_tests_are_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE) as maker:
        assert maker.stdout
        inside = int(maker.stdout.readline())
        maker.kill()
    left = set(NAMESPACES.glob(f"{PREFIX}{maker.pid}-*"))
    assert len(left) == 2
    with Network() as network:  # which removes it
        network.host("node")
        remove_left()
        assert not set(NAMESPACES.glob(f"{PREFIX}*")) & left
        assert len(set(NAMESPACES.glob(f"{PREFIX}{os.getpid()}-*"))) == 2
    assert not control_groups(maker.pid)
    assert has_ended(inside)
