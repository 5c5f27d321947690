"""Whether the GPU that the engine is told to use is there, known before anything is started."""

from __future__ import annotations

import ctypes
from typing import Any

from serving.errors import StartError

LIBRARY = "libcuda.so.1"  # the driver's; it comes from the host, never with an image
OLDEST_CUDA = 11_000  # 1000 * major + 10 * minor; any driver for CUDA 11 runs the image's 11.8
NEEDED = "the GPU image needs NVIDIA driver 450.80.02 or later on the host"


def check_device(device: str) -> None:
    """Raises `StartError`, in one line, if `device` is `gpu` and none can be used."""
    if device != "gpu":
        return
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        raise StartError(
            f"no NVIDIA driver here ({LIBRARY} is not found): start the container with"
            f" `docker run --gpus all` (NVIDIA Container Toolkit); {NEEDED}."
            " Without a GPU use the CPU image"
        ) from None
    _check_driver(driver)


def _check_driver(driver: Any) -> None:
    version, count = ctypes.c_int(), ctypes.c_int()
    status = driver.cuInit(0)
    if status == 0:
        driver.cuDriverGetVersion(ctypes.byref(version))
        driver.cuDeviceGetCount(ctypes.byref(count))
        if version.value < OLDEST_CUDA:
            major, minor = version.value // 1000, version.value % 1000 // 10
            raise StartError(f"the NVIDIA driver is for CUDA {major}.{minor}: {NEEDED}")
    if status != 0 or count.value == 0:
        raise StartError(
            f"the NVIDIA driver finds no GPU (cuInit gives {status}): start the container with"
            f" `docker run --gpus all`; {NEEDED}"
        )
