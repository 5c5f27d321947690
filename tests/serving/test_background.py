"""The gateway's work in the background: an error there is no silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY, free_port

PROGRAM = """
from serving import gateway

async def fails(*_):
    raise KeyError("봄")

{replaced} = fails
gateway.main()
"""


@pytest.mark.parametrize(
    "replaced", ["gateway.watch_health", "gateway.start", "gateway.Recovery.watch"]
)
def test_an_unexpected_error_is_logged_and_has_the_gateway_started_again(
    tmp_path: Path, replaced: str
) -> None:
    ports = {"SAGEMAKER_BIND_TO_PORT": free_port(), "MANAGEMENT_PORT": free_port()}
    environment = {name: str(port) for name, port in ports.items()} | {
        "HOST": "127.0.0.1",
        "RUN_DIR": str(tmp_path),
        "PROBE_SECRET": "x",
        "MODEL_STORE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(replaced=replaced)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["level"] == "error"
    assert "KeyError: '봄'" in last["traceback"]


def test_a_gateway_that_cannot_start_says_so_and_gives_up(tmp_path: Path) -> None:
    environment = {"RUN_DIR": str(tmp_path), "PROBE_SECRET": "x", "MODEL_STORE": "ftp://없음"}
    done = subprocess.run(
        [sys.executable, "-m", "serving.gateway"],
        cwd=REPOSITORY,
        env={**os.environ, "SAGEMAKER_BIND_TO_PORT": str(free_port()), "HOST": "127.0.0.1"}
        | {"MANAGEMENT_PORT": str(free_port()), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "ftp://없음" in done.stderr
