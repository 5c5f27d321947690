"""The gateway's process: errors in its background tasks, and what it cannot start without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.api import tracing
from serving.api.grpc import port
from serving.errors import StartError
from serving.gateway import _grpc_port, _traced
from tests.e2e.server import free_port
from tests.processes import python
from tests.serving.api.gateways import World

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


STOPPED = """
import os, signal
from serving import gateway

async def stopped(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise KeyError("the signal was lost")

gateway.Tokens.refresh = stopped
gateway.main()
"""


def test_a_signal_before_the_gateway_listens_ends_it_at_once(tmp_path: Path) -> None:
    """It was ignored, and a stop waited for all of DRAIN_S."""
    done = gateway(str(tmp_path), tmp_path, "-c", STOPPED)
    assert done.returncode == -signal.SIGTERM, done.stdout


def test_a_gateway_that_cannot_start_says_so_and_gives_up(tmp_path: Path) -> None:
    done = gateway("ftp://없음", tmp_path, "-m", "serving.gateway")
    assert done.returncode == 2
    assert "ftp://없음" in done.stderr


@pytest.mark.parametrize(
    ("opened", "setting", "module", "absent", "extra"),
    [
        (_grpc_port, {"grpc_port": 1}, port, "grpc", "grpc"),
        (_traced, {"otlp_endpoint": "http://a"}, tracing, "opentelemetry.sdk.resources", "tracing"),
    ],
)
def test_without_an_extras_packages_it_is_said_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, opened: Any, setting: Any, module: Any, absent: str, extra: str
) -> None:
    world = World(**setting)
    monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(StartError, match=rf"pip install -r requirements/{extra}\.txt"):
        opened(world.gateway, world.app)
