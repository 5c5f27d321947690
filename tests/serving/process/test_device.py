"""A GPU that is asked for and not there is told in one line, by a stand-in for the driver that is
compiled here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.errors import StartError
from serving.process import device
from serving.process.device import check_device
from tests.processes import python

DRIVER = """
#include <stdlib.h>
static int given(const char *name) { return atoi(getenv(name)); }
int cuInit(unsigned flags) { return given("status"); }
int cuDriverGetVersion(int *version) { *version = given("version"); return 0; }
int cuDeviceGetCount(int *count) { *count = given("count"); return 0; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int capability = given("capability");
  if (device != 100 || capability == 0) return 1;
  if (attribute == 75) *value = capability / 10;
  else if (attribute == 76) *value = capability % 10;
  else return 1;
  return 0;
}
"""
# Of requirements/run.txt's onnxruntime: CUDA 12's for Python 3.10, CUDA 13's for later ones.
NEWER = sys.version_info >= (3, 11)
MXNET, ONNX = "mxnet", "onnxruntime"
OLDEST = {MXNET: "450.80.02", ONNX: "580.65.06" if NEWER else "525.60.13"}
FINE = None


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("driver") / "driver.c"
    source.write_text(DRIVER)
    library = source.with_name("libcuda.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


def newer(*row: object, reason: str) -> object:
    return pytest.param(*row, marks=pytest.mark.skipif(not NEWER, reason=reason))


@pytest.mark.parametrize(
    ("backend", "driver", "said"),  # the driver's status, version, GPUs, their capability
    [
        (MXNET, (100, 12_040, 0, 80), "finds no GPU (cuInit gives 100)"),
        (ONNX, (0, 13_000, 0, 80), "finds no GPU"),
        (MXNET, (0, 10_020, 1, 80), f"is for CUDA 10.2: mxnet needs NVIDIA driver {OLDEST[MXNET]}"),
        (ONNX, (0, 11_040, 1, 80), f"CUDA 11.4: onnxruntime needs NVIDIA driver {OLDEST[ONNX]}"),
        # No code for the GPU: H100, K80, V100, B200.
        (MXNET, (0, 13_000, 1, 90), "compute capability 9.0: set ENGINE_BACKEND=onnxruntime"),
        (MXNET, (0, 13_000, 1, 37), "compute capability 3.7: no other backend has it"),
        newer(
            *(ONNX, (0, 13_000, 1, 70), "compute capability 7.0: set ENGINE_BACKEND=mxnet"),
            reason="CUDA 12's build has code for it",
        ),
        newer(
            *(ONNX, (0, 13_000, 1, 100), "compute capability 10.0: no other backend has it"),
            reason="CUDA 12's build has PTX for it",
        ),
        # V100; L4, by code for 8.6; T4; H100; a driver that does not say it.
        (MXNET, (0, 11_000, 1, 70), FINE),
        (MXNET, (0, 12_040, 1, 89), FINE),
        (ONNX, (0, 13_000, 1, 75), FINE),
        (ONNX, (0, 13_000, 1, 90), FINE),
        (ONNX, (0, 13_000, 1, 0), FINE),
    ],
)
def test_a_driver_or_gpu_that_will_not_do_is_told(
    library: Path, monkeypatch: pytest.MonkeyPatch, backend: str, driver: Any, said: str | None
) -> None:
    for name, value in zip(("status", "version", "count", "capability"), driver, strict=True):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(device, "LIBRARY", str(library))
    if said is FINE:
        check_device("gpu", backend)
    else:
        with pytest.raises(StartError, match=re.escape(said)):
            check_device("gpu", backend)


def start(device: str, backend: str) -> str:
    """Run `serve` as far as its checks, and return its output: the Java it names does not run."""
    variables = {"ENGINE_DEVICE": device, "ENGINE_BACKEND": backend, "JAVA_HOME": "/nowhere"}
    variables |= {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/nowhere"}
    done = python("-m", "serving.entrypoint", "serve", env=variables)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_without_a_driver_the_start_says_what_is_missing_unless_it_needs_none() -> None:
    for backend in OLDEST:
        line = start("gpu", backend)
        assert "libcuda.so.1" in line
        assert "--gpus all" in line
        assert f"{backend} needs NVIDIA driver {OLDEST[backend]}" in line
    assert "Java" in start("cpu", MXNET)
