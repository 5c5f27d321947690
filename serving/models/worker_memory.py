"""Whether the container has room for another worker.

The engine admits weights and K/V caches against a budget of its own. What the other processes take
is not in it: with many small models, their workers are what fills the container.
"""

from __future__ import annotations

from pathlib import Path

from common.memory import CGROUP, MIB, container_memory
from serving.errors import InsufficientStorage

# A worker that has answered requests (it shares little), and some for what all others grow by.
# Two loads at the same time may look at the same free memory.
NEEDED_BYTES = 64 * MIB


def check_worker_memory(model: str, cgroup: Path = CGROUP) -> None:
    """Raises `InsufficientStorage` unless another worker fits into the container."""
    memory = container_memory(cgroup)
    if memory is not None and memory.free_bytes < NEEDED_BYTES:
        raise InsufficientStorage(
            f"model {model} needs a worker and {NEEDED_BYTES // MIB} MiB for it, but of the"
            f" container's {memory.limit_bytes // MIB} MiB"
            f" {max(memory.free_bytes, 0) // MIB} are free",
            missing_bytes=NEEDED_BYTES - memory.free_bytes,
        )
