"""NVIDIA's driver, for which a few lines of C stand in, and its errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from common.errors import InvalidRequest
from common.memory import is_out_of_memory
from engine.backends import nvidia
from engine.settings import Settings
from engine.step_loop import GPU_LOST
from tests.engine.models import make_artifact
from tests.processes import python

DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = device == 40 ? TOTAL : 0; return 0; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
"""


def driver(folder: Path, *, total: int = 16 << 30, init: int = 0) -> str:
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    defined = [f"-DINIT={init}", f"-DTOTAL={total}ull"]
    subprocess.run(["cc", "-shared", "-fPIC", *defined, source, "-o", library], check=True)
    return str(library)


@pytest.mark.parametrize(
    ("gib", "budget"), [(16, 14), (80, 70), (8, 6.5), (2, 1)], ids=lambda gib: f"{gib}GiB"
)
def test_a_reserve_is_left_of_the_gpus_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, budget: float
) -> None:
    monkeypatch.setattr(nvidia, "LIBRARY", driver(tmp_path, total=gib << 30))
    assert nvidia.memory_bytes() == gib << 30
    assert Settings(device="gpu").budget_bytes == int(budget * (1 << 30))
    assert Settings(device="gpu", memory_mib=100).budget_bytes == 100 << 20


def test_without_a_gpu_or_driver_the_error_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library, message in (
        (driver(tmp_path, init=100), r"cuInit fails with 100 \(CUDA_ERROR_NO_DEVICE\)"),
        ("libcuda-of-no-machine.so.1", "no NVIDIA driver .*--gpus all.*ENGINE_DEVICE=cpu"),
    ):
        monkeypatch.setattr(nvidia, "LIBRARY", library)
        with pytest.raises(InvalidRequest, match=message):
            nvidia.memory_bytes()


# As MXNet 1.9.1, onnxruntime 1.31.1 and what they call word it.
NO_MEMORY = (
    "Check failed: e == cudaSuccess || e == cudaErrorCudartUnloading: cudaMalloc retry failed:"
    " out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=a ; expr=cublasCreate(&h);",
    "BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested buffer of"
    " size 4096",
    "BFCArena::AllocateRawInternal(size_t, bool) Available memory of 1 is smaller than requested"
    " bytes of 2",
    "CUDA failure 2: out of memory ; GPU=0 ; file=cuda_allocator.cc ; expr=cudaMalloc(&p, size);",
    "Failed to allocate CPU Memory",
    "std::bad_alloc",
)
LOST = (
    "Check failed: e == cudaSuccess: CUDA: an illegal memory access was encountered",
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ;"
    " file=cuda_allocator.cc ; expr=cudaFree(p);",
    "CUDA failure 719: unspecified launch failure",
    "CUDA error 214: uncorrectable ECC error encountered",
)
OTHER = ("CUBLAS_STATUS_NOT_SUPPORTED ; file=cuda_allocator.cc", "shape mismatch in memory.cc")


def test_errors_of_memory_and_of_a_lost_gpu_are_distinguished_from_others() -> None:
    assert all(map(is_out_of_memory, NO_MEMORY))
    assert not any(map(is_out_of_memory, (*LOST, *OTHER)))
    assert all(map(nvidia.is_fatal, LOST))
    assert not any(map(nvidia.is_fatal, (*NO_MEMORY, *OTHER)))


BREAK_A_STEP = """
import sys, threading
from engine.engine import Engine
from common.parameters import Parameters
from engine.settings import Settings

engine = Engine(Settings(backend="native", memory_mib=64))
compute = engine.load("model", sys.argv[1]).core.compute

def broken(pieces):
    raise RuntimeError(sys.argv[2])

compute.run = broken
failed = threading.Event()
emit = lambda item: hasattr(item, "status") and failed.set()
engine.submit("model", "안녕하세요", Parameters(), emit).result()
assert failed.wait(30)
print("failed")
engine.close()
"""


@pytest.mark.parametrize(
    ("error", "status", "output"), [(LOST[0], GPU_LOST, ""), (OTHER[1], 0, "failed\n")]
)
def test_an_engine_that_lost_its_gpu_ends_so_that_it_is_started_anew(
    tmp_path: Path, error: str, status: int, output: str
) -> None:
    path = make_artifact(tmp_path / "model")
    result = python("-c", BREAK_A_STEP, str(path), error)
    assert (result.returncode, result.stdout) == (status, output), result.stderr
