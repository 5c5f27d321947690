"""The memory of the NVIDIA GPU that the engine uses: the first visible one.

The size comes from the driver's library, which exists wherever CUDA works, also in containers
without `nvidia-smi`. It obeys `CUDA_VISIBLE_DEVICES`, reports the size of a MIG slice, and takes no
memory on the GPU. https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
from typing import Any

from common.errors import InvalidRequest
from common.memory import MIB

LIBRARY = "libcuda.so.1"
# CUDA errors after which every call of the process fails, until it ends.
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
FATAL = (
    "illegal memory access", "illegal instruction", "illegal address", "misaligned address",
    "invalid program counter", "unspecified launch failure", "hardware stack error",
    "uncorrectable ecc", "device-side assert", "launch timed out", "gpu is lost",
)  # fmt: skip
# For CUDA's context, working memory of cuBLAS and cuDNN, and activations. Smaller: steps fail.
MIN_RESERVE_BYTES = 1536 * MIB


def default_budget_bytes() -> int:
    """Return the GPU's bytes of memory less a reserve. Raises `InvalidRequest` without a GPU."""
    total = memory_bytes()
    return total - min(max(MIN_RESERVE_BYTES, total // 8), total // 2)


def is_fatal(text: str) -> bool:
    """Whether a library's error message means that this process cannot use the GPU any more."""
    return any(message in text.lower() for message in FATAL)


def memory_bytes() -> int:
    """Return the GPU's bytes of memory. Raises `InvalidRequest` where there is no usable GPU."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        raise InvalidRequest(
            f"there is no NVIDIA driver here ({LIBRARY} is missing): run on a machine with one,"
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
