"""Checks that the container has memory for another worker.

The engine's budget covers weights and K/V caches only. The workers of many small models could
exceed the container's limit.
"""

from __future__ import annotations

from pathlib import Path

from common.memory import CGROUP, MIB, container_memory
from serving.errors import InsufficientStorage

# The memory of a worker after some requests, and a reserve for the growth of others and for two
# loads that see the same free memory. Larger: fewer workers. Smaller: the kernel kills processes.
NEEDED_BYTES = 64 * MIB


def check_worker_memory(model: str, cgroup: Path = CGROUP) -> None:
    """Raise `InsufficientStorage` unless another worker fits into the container."""
    memory = container_memory(cgroup)
    if memory is not None and memory.free_bytes < NEEDED_BYTES:
        raise InsufficientStorage(
            f"model {model} needs a worker and {NEEDED_BYTES // MIB} MiB for it, but of the"
            f" container's {memory.limit_bytes // MIB} MiB"
            f" {max(memory.free_bytes, 0) // MIB} are free",
            missing_bytes=NEEDED_BYTES - memory.free_bytes,
        )
