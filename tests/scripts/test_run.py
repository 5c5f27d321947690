"""How scripts/run asks Docker, with a stand-in that writes down the arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from serving.process import supervisor
from serving.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = """#!/bin/sh
case $1 in run) printf '%s\\n' "$@" >"$CALLS" ;; esac
"""
STOP_S = Settings().drain_s + supervisor.LAST_GRACE_S + supervisor.GRACE_S + supervisor.KILLED_S


def run(folder: Path, *arguments: str) -> list[str]:
    docker, calls = folder / "docker", folder / "calls"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CALLS": str(calls)}
    command = [str(ROOT / "scripts" / "run"), *arguments]
    subprocess.run(command, env=environment, check=True, timeout=60)
    return calls.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("kind", ["cpu", "slim", "gpu"])
def test_each_image_that_is_built_can_be_run(tmp_path: Path, kind: str) -> None:
    words = run(tmp_path, kind)
    assert words[-1] == f"kogpt2-serving:{kind}"
    assert ("--gpus" in words) == (kind == "gpu")


def test_a_stop_has_the_time_that_answers_in_flight_are_given(tmp_path: Path) -> None:
    (given,) = [after for word, after in pairwise(run(tmp_path)) if word == "--stop-timeout"]
    assert int(given) >= STOP_S
    for name in ("compose.yaml", "compose.fleet.yaml"):
        file = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
        services = file["services"].values()
        graces = [s["stop_grace_period"] for s in services if "stop_grace_period" in s]
        assert graces
        assert all(int(grace.removesuffix("s")) >= STOP_S for grace in graces)


def test_a_plain_import_of_mxnet_works_in_an_image(tmp_path: Path) -> None:
    """By the file that becomes its sitecustomize."""
    made = (ROOT / "docker/sitecustomize.py").read_text(encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(made, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    script = "import mxnet, sys; print(mxnet.nd.ones(2).sum().asscalar(), 'common' in sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["2.0", "True"], done.stderr
