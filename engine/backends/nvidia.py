"""What the NVIDIA driver says of the GPU that the engine uses: the first one that it may see.

Asked of the driver's own library, which is wherever CUDA works, also where a container lacks
`nvidia-smi`. It obeys `CUDA_VISIBLE_DEVICES`, knows a MIG slice's own size, and takes no memory
on the GPU. https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
from typing import Any

from common.errors import InvalidRequest

LIBRARY = "libcuda.so.1"
# CUDA errors after which every call of the process fails, until it ends.
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
FATAL = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "invalid program counter",
    "unspecified launch failure",
    "hardware stack error",
    "uncorrectable ecc",
    "device-side assert",
    "launch timed out",
    "gpu is lost",
)
MIB = 1 << 20
# For CUDA's context, cuBLAS's and cuDNN's working memory, and what a step computes.
LEAST_RESERVE_BYTES = 1536 * MIB


def default_budget_bytes() -> int:
    """The GPU's memory less a reserve. Raises `InvalidRequest` where there is no GPU."""
    total = memory_bytes()
    return total - min(max(LEAST_RESERVE_BYTES, total // 8), total // 2)


def is_fatal(text: str) -> bool:
    """Whether a library's error message says that this process can use the GPU no more."""
    return any(said in text.lower() for said in FATAL)


def memory_bytes(library: str = "") -> int:
    """The GPU's whole memory. Raises `InvalidRequest` where there is no GPU that can be used."""
    library = library or LIBRARY
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        raise InvalidRequest(
            f"there is no NVIDIA driver here ({library} is missing): run on a machine with one,"
            " a container with `docker run --gpus all`, or set ENGINE_DEVICE=cpu"
        ) from None
    device, size = ctypes.c_int(), ctypes.c_size_t()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGet", ctypes.byref(device), 0)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(size), device)
    return size.value


def _call(driver: ctypes.CDLL, function: str, *arguments: Any) -> None:
    code = getattr(driver, function)(*arguments)
    if code != 0:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        raise InvalidRequest(
            f"there is no GPU that can be used: the driver's {function} fails with {code}"
            f" ({(name.value or b'unknown').decode()}); set ENGINE_DEVICE=cpu to do without one"
        )
