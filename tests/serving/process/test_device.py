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
int cuDeviceGet(int *device, int index) {{ *device = 100 + index; return 0; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{
  if (device != 100 || {capability} == 0) return 1;
  if (attribute == 75) *value = {capability} / 10;
  else if (attribute == 76) *value = {capability} % 10;
  else return 1;
  return 0;
}}
"""


def driver(folder: Path, status: int, version: int, count: int, capability: int = 80) -> Path:
    source = folder / "driver.c"
    source.write_text(
        DRIVER.format(status=status, version=version, count=count, capability=capability)
    )
    command = ["gcc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return folder


def start(device: str, libraries: Path, backend: str = "mxnet") -> subprocess.CompletedProcess[str]:
    """`serve` as far as its checks: the Java it names does not run."""
    return subprocess.run(
        [sys.executable, "-m", "serving.entrypoint", "serve"],
        cwd=REPOSITORY,
        env={
            "PATH": "/usr/bin:/bin",
            "ENGINE_DEVICE": device,
            "ENGINE_BACKEND": backend,
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


# Of requirements/run.txt's onnxruntime: CUDA 12's for Python 3.10, CUDA 13's for later ones.
NEWER = sys.version_info >= (3, 11)
ONNXRUNTIME_DRIVER = "580.65.06" if NEWER else "525.60.13"
DRIVERS = [("mxnet", "450.80.02"), ("onnxruntime", ONNXRUNTIME_DRIVER)]


@pytest.mark.parametrize(("backend", "oldest"), DRIVERS)
def test_without_a_driver_it_says_what_is_missing(
    tmp_path: Path, backend: str, oldest: str
) -> None:
    line = said(start("gpu", tmp_path, backend))
    assert "libcuda.so.1" in line
    assert "--gpus all" in line
    assert f"{backend} needs NVIDIA driver {oldest}" in line


@pytest.mark.parametrize(
    ("backend", "status", "version", "count", "words"),
    [
        ("mxnet", 100, 12_040, 0, "finds no GPU (cuInit gives 100)"),
        ("onnxruntime", 0, 13_000, 0, "finds no GPU"),
        ("mxnet", 0, 10_020, 1, "is for CUDA 10.2: mxnet needs NVIDIA driver 450.80.02"),
        (
            "onnxruntime",
            0,
            11_040,
            1,
            f"is for CUDA 11.4: onnxruntime needs NVIDIA driver {ONNXRUNTIME_DRIVER}",
        ),
    ],
)
def test_a_driver_that_will_not_do_is_told(
    tmp_path: Path, backend: str, status: int, version: int, count: int, words: str
) -> None:
    assert words in said(start("gpu", driver(tmp_path, status, version, count), backend))


@pytest.mark.parametrize(
    ("backend", "capability", "words"),
    [
        ("mxnet", 90, "compute capability 9.0: set ENGINE_BACKEND=onnxruntime"),  # H100
        ("mxnet", 37, "compute capability 3.7: no other backend has it"),  # K80
        pytest.param(
            *("onnxruntime", 70, "compute capability 7.0: set ENGINE_BACKEND=mxnet"),  # V100
            marks=pytest.mark.skipif(not NEWER, reason="CUDA 12's build has code for it"),
        ),
        pytest.param(
            *("onnxruntime", 100, "compute capability 10.0: no other backend has it"),  # B200
            marks=pytest.mark.skipif(not NEWER, reason="CUDA 12's build has PTX for it"),
        ),
    ],
)
def test_a_gpu_that_the_backend_has_no_code_for_is_told(
    tmp_path: Path, backend: str, capability: int, words: str
) -> None:
    assert words in said(start("gpu", driver(tmp_path, 0, 13_000, 1, capability), backend))


@pytest.mark.parametrize(
    ("backend", "version", "capability"),
    [
        ("mxnet", 11_000, 70),  # V100
        ("mxnet", 12_040, 89),  # L4, by code for 8.6
        ("onnxruntime", 13_000, 75),  # T4
        ("onnxruntime", 13_000, 90),  # H100
        ("onnxruntime", 13_000, 0),  # a driver that does not say it
    ],
)
def test_a_driver_and_a_gpu_that_will_do_are_no_error(
    tmp_path: Path, backend: str, version: int, capability: int
) -> None:
    # The next check is that of Java.
    assert "Java" in said(start("gpu", driver(tmp_path, 0, version, 1, capability), backend))


def test_a_cpu_needs_no_driver(tmp_path: Path) -> None:
    assert "Java" in said(start("cpu", tmp_path))
