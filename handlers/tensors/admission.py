"""Checks that the container has enough memory for a model that its own worker holds."""

from __future__ import annotations

import psutil

from common.errors import NeverFits, OutOfMemory
from common.memory import MIB, container_memory, memory_limit_bytes

# Not available to models: the gateway's buffers, and the JVM's heap, which grows. A smaller value
# admits more models and risks that the kernel kills a process.
RESERVE_BYTES = 128 * MIB


def check_memory(size_bytes: int) -> None:
    """Check that `size_bytes` of memory are available for a model.

    Raises `OutOfMemory`, or `NeverFits` if evicting other models could not free enough.
    """
    limit, available = memory_limit_bytes() - RESERVE_BYTES, available_bytes() - RESERVE_BYTES
    if size_bytes > available:
        error = NeverFits if size_bytes > limit else OutOfMemory
        raise error(
            f"the model needs about {size_bytes / MIB:.0f} MiB, but of the container's"
            f" {limit / MIB:.0f} MiB only {max(available, 0) / MIB:.0f} are left"
        )


def available_bytes() -> int:
    """Return the available memory of the container or of the machine, whichever is less."""
    machine: int = psutil.virtual_memory().available
    container = container_memory()
    return machine if container is None else min(machine, container.free_bytes)
