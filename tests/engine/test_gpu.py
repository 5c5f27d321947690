"""What is asked of NVIDIA's driver. A few lines of C stand in for it where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine import gpu
from engine.errors import InvalidRequest
from engine.settings import Settings

DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = device == 40 ? TOTAL : 0; return 0; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
"""
T4_BYTES = 15_843_721_216


def driver(folder: Path, *, total: int = T4_BYTES, init: int = 0) -> str:
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    defined = [f"-DINIT={init}", f"-DTOTAL={total}ull"]
    subprocess.run(["cc", "-shared", "-fPIC", *defined, source, "-o", library], check=True)
    return str(library)


def test_the_gpus_memory_is_what_the_driver_says(tmp_path: Path) -> None:
    assert gpu.memory_bytes(driver(tmp_path)) == T4_BYTES


@pytest.mark.parametrize(
    ("gib", "budget"), [(16, 14), (80, 70), (8, 6.5), (2, 1)], ids=lambda gib: f"{gib}GiB"
)
def test_a_reserve_is_left_of_the_gpus_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, budget: float
) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", driver(tmp_path, total=gib << 30))
    settings = Settings(device="gpu")
    assert settings.budget_bytes == int(budget * (1 << 30))
    assert Settings(device="gpu", memory_mib=100).budget_bytes == 100 << 20


def test_a_driver_without_a_gpu_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cuInit fails with 100 \(CUDA_ERROR_NO_DEVICE\)"):
        gpu.memory_bytes(driver(tmp_path, init=100))


def test_a_machine_without_a_driver_is_told_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match=r"no NVIDIA driver .*--gpus all.*ENGINE_DEVICE=cpu"):
        gpu.memory_bytes("libcuda-of-no-machine.so.1")
