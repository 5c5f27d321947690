"""Checks the GPU and its driver before anything is started."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

from serving.errors import StartError

LIBRARY = "libcuda.so.1"  # part of the driver, which comes from the host, not from the image
# CUdevice_attribute: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True)
class Build:
    """The drivers and GPUs that a backend's CUDA build runs on.

    Drivers are from CUDA's release notes. `code` and `ptx` are the compute capabilities, as
    10 * major + minor, that the wheel's libraries have code for. Binary code runs on GPUs of the
    same major and the same or a later minor version; PTX, which a driver compiles, on all later.
    """

    cuda: int  # the oldest CUDA that a driver must support; 1000 * major + 10 * minor
    driver: str
    code: tuple[int, ...]
    ptx: int | None = None

    def runs_on(self, capability: int) -> bool:
        if self.ptx is not None and capability >= self.ptx:
            return True
        return any(code // 10 == capability // 10 and code <= capability for code in self.code)

    @property
    def needs(self) -> str:
        return f"needs NVIDIA driver {self.driver} or later on the host"


# A driver for any CUDA 11 runs the image's CUDA 11.8.
BUILDS = {"mxnet": Build(11_000, "450.80.02", (50, 60, 70, 80, 86))}
if sys.version_info >= (3, 11):
    BUILDS["onnxruntime"] = Build(13_000, "580.65.06", (75, 80, 86, 89, 90, 120))
else:
    BUILDS["onnxruntime"] = Build(12_000, "525.60.13", (60, 70, 75, 80, 86, 90), ptx=90)


def check_device(device: str, backend: str) -> None:
    """Raise `StartError` if `device` is `gpu` and `backend` cannot use the machine's GPU."""
    if device != "gpu" or backend not in BUILDS:  # the engine refuses an unknown backend
        return
    needed = f"{backend} {BUILDS[backend].needs}"
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        raise StartError(
            f"there is no NVIDIA driver ({LIBRARY}): start the container with"
            f" `docker run --gpus all` (NVIDIA Container Toolkit); {needed}."
            " Without a GPU use the CPU image"
        ) from None
    _check_driver(driver, BUILDS[backend].cuda, needed)
    _check_capability(_capability(driver), backend)


def _check_driver(driver: Any, oldest_cuda: int, needed: str) -> None:
    version, count = ctypes.c_int(), ctypes.c_int()
    status = driver.cuInit(0)
    if status == 0:
        driver.cuDriverGetVersion(ctypes.byref(version))
        driver.cuDeviceGetCount(ctypes.byref(count))
        if version.value < oldest_cuda:
            major, minor = version.value // 1000, version.value % 1000 // 10
            raise StartError(f"the NVIDIA driver is for CUDA {major}.{minor}: {needed}")
    if status != 0 or count.value == 0:
        raise StartError(
            f"the NVIDIA driver finds no GPU (cuInit gives {status}): start the container with"
            f" `docker run --gpus all`; {needed}"
        )


def _capability(driver: Any) -> int:
    """Return the first GPU's compute capability, 10 * major + minor; 0 on errors of the driver."""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    statuses = (
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), COMPUTE_CAPABILITY_MINOR, device),
    )
    return 0 if any(statuses) else 10 * major.value + minor.value


def _check_capability(capability: int, backend: str) -> None:
    if not capability or BUILDS[backend].runs_on(capability):
        return
    others = [name for name, build in BUILDS.items() if build.runs_on(capability)]
    instead = (
        f"set ENGINE_BACKEND={others[0]}, with an image that was built with it"
        if others
        else "no other backend has it either; use the CPU image"
    )
    raise StartError(
        f"{backend} has no code for this GPU, of compute capability"
        f" {capability // 10}.{capability % 10}: {instead}"
    )
