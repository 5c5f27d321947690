"""Ports of runs at the same time, and programs that do not start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.process import PORTS, SHARES, Program, ProgramError, free_port
from tests.processes import python

MANY = len(PORTS) // SHARES + 1  # at least one port twice
PROGRAM = f"from testbed.process import free_port; print([free_port() for _ in range({MANY})])"


def test_processes_at_the_same_time_draw_different_ports() -> None:
    ours = {free_port() for _ in range(MANY)}
    theirs = set(json.loads(python("-c", PROGRAM).stdout))
    assert theirs
    assert ours.isdisjoint(theirs)
    assert (ours | theirs).issubset(PORTS)


def test_the_error_of_a_program_that_does_not_start_has_the_end_of_its_log(tmp_path: Path) -> None:
    lines = ["시작", "", "없는 파일", "the engine ended"]
    program = Program(["printf", "%s\\n", *lines], tmp_path / "server.log")
    with pytest.raises(ProgramError) as caught:
        program._wait(lambda: False)
    first, *last = str(caught.value).splitlines()
    assert first.startswith("server did not start; ")
    assert last == ["시작", "없는 파일", "the engine ended"]
