"""How scripts/build asks Docker, with a stand-in that writes down what it was asked."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import engine.settings
import serving.settings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = """#!/bin/sh
case "$*" in
  "build --help") echo "$BUILD_HELP" ;;
  build*) echo "$@" >>"$CALLS" ;;
  image*) echo 123000000 ;;
esac
"""


@pytest.mark.parametrize("builder", ["BuildKit", "legacy"])
def test_the_manifest_is_one_that_sagemaker_takes(tmp_path: Path, builder: str) -> None:
    docker, calls = tmp_path / "docker", tmp_path / "calls"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    knows = "--provenance string" if builder == "BuildKit" else ""
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BUILD_HELP": f"--platform string\n{knows}",
        "CALLS": str(calls),
    }
    subprocess.run([ROOT / "scripts" / "build", "cpu"], env=environment, check=True, timeout=60)
    words = calls.read_text().split()
    assert words[words.index("--platform") + 1] == "linux/amd64"
    assert ("--provenance=false" in words) == (builder == "BuildKit")


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("Dockerfile.cpu", {"RUN_DIR"}),
        ("Dockerfile.gpu", {"RUN_DIR", "ENGINE_DEVICE", "ENGINE_BACKEND", "START_TIMEOUT_S"}),
    ],
)
def test_an_image_sets_only_what_is_its_own(file: str, own: set[str]) -> None:
    text = (ROOT / file).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = " ".join(line for line in text.splitlines() if line.startswith("ENV "))
    variables = {
        field.metadata["variable"]
        for settings in (serving.settings.Settings, engine.settings.Settings)
        for field in settings.__dataclass_fields__.values()
    }
    assert set(re.findall(r"([A-Z0-9_]+)=", lines)) & variables == own
