"""Ports of runs at the same time."""

from __future__ import annotations

import json

from testbed.process import PORTS, SHARES, free_port
from tests.processes import python

MANY = len(PORTS) // SHARES + 1  # at least one port twice
PROGRAM = f"from testbed.process import free_port; print([free_port() for _ in range({MANY})])"


def test_processes_at_the_same_time_draw_different_ports() -> None:
    ours = {free_port() for _ in range(MANY)}
    theirs = set(json.loads(python("-c", PROGRAM).stdout))
    assert theirs
    assert ours.isdisjoint(theirs)
    assert (ours | theirs).issubset(PORTS)
