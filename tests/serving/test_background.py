"""The gateway's work in the background: an error there is no silence."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import free_port
from tests.processes import python

PROGRAM = """
from serving import gateway

async def fails(*_):
    raise KeyError("봄")

{replaced} = fails
gateway.main()
"""


def gateway(store: str, run_dir: Path, *program: str) -> subprocess.CompletedProcess[str]:
    ports = {name: str(free_port()) for name in ("SAGEMAKER_BIND_TO_PORT", "MANAGEMENT_PORT")}
    own = {"HOST": "127.0.0.1", "RUN_DIR": str(run_dir), "PROBE_SECRET": "x", "MODEL_STORE": store}
    return python(*program, env={**os.environ, **ports, **own})


@pytest.mark.parametrize(
    "replaced", ["gateway.watch_health", "gateway.start", "gateway.Recovery.watch"]
)
def test_an_unexpected_error_is_logged_and_has_the_gateway_started_again(
    tmp_path: Path, replaced: str
) -> None:
    done = gateway(str(tmp_path), tmp_path, "-c", PROGRAM.format(replaced=replaced))
    assert done.returncode == 1, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["level"] == "error"
    assert "KeyError: '봄'" in last["traceback"]


def test_a_gateway_that_cannot_start_says_so_and_gives_up(tmp_path: Path) -> None:
    done = gateway("ftp://없음", tmp_path, "-m", "serving.gateway")
    assert done.returncode == 2
    assert "ftp://없음" in done.stderr
