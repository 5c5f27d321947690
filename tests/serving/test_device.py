"""A GPU that is asked for and not there is told in one line. Stand-ins for the driver are compiled
here, because they must be found the way that the real one is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY

DRIVER = """
int cuInit(unsigned flags) {{ return {status}; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
"""


def driver(folder: Path, status: int, version: int, count: int) -> Path:
    source = folder / "driver.c"
    source.write_text(DRIVER.format(status=status, version=version, count=count))
    command = ["gcc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return folder


def start(device: str, libraries: Path) -> subprocess.CompletedProcess[str]:
    """`serve` as far as its checks: the Java it names does not run."""
    return subprocess.run(
        [sys.executable, "-m", "serving.entrypoint", "serve"],
        cwd=REPOSITORY,
        env={
            "PATH": "/usr/bin:/bin",
            "ENGINE_DEVICE": device,
            "LD_LIBRARY_PATH": str(libraries),
            "JAVA_HOME": "/nowhere",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_without_a_driver_it_says_what_is_missing(tmp_path: Path) -> None:
    line = said(start("gpu", tmp_path))
    assert "libcuda.so.1" in line
    assert "--gpus all" in line
    assert "450.80.02" in line


@pytest.mark.parametrize(
    ("status", "version", "count", "words"),
    [
        (100, 12_040, 0, "finds no GPU (cuInit gives 100)"),
        (0, 12_040, 0, "finds no GPU"),
        (0, 10_020, 1, "is for CUDA 10.2: the GPU image needs NVIDIA driver 450.80.02"),
    ],
)
def test_a_driver_that_will_not_do_is_told(
    tmp_path: Path, status: int, version: int, count: int, words: str
) -> None:
    assert words in said(start("gpu", driver(tmp_path, status, version, count)))


def test_a_driver_that_will_do_is_no_error(tmp_path: Path) -> None:
    assert "Java" in said(start("gpu", driver(tmp_path, 0, 12_040, 1)))  # the next check


def test_a_cpu_needs_no_driver(tmp_path: Path) -> None:
    assert "Java" in said(start("cpu", tmp_path))
