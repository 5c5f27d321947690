"""The operating system's processes of workers: their memory, and waiting for their exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

# How long killed processes may take to free their memory; many gigabytes take seconds.
EXIT_S, EXIT_POLL_S = 10.0, 0.005


def private_bytes(sockets: Set[str]) -> dict[str, int]:
    """The private memory of each worker with its descendants, by socket.

    Memory that a file does not back; shared memory counts for each process. Reads each process
    once, because there may be as many as models.
    """
    sizes: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    workers: defaultdict[str, list[int]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended
            memory = process.memory_info()
            sizes[process.pid] = memory.rss - memory.shared
            children[process.ppid()].append(process.pid)
            for socket in sockets & set(process.cmdline()):
                workers[socket].append(process.pid)

    def tree_bytes(pid: int) -> int:
        return sizes[pid] + sum(map(tree_bytes, children[pid]))

    return {socket: max(map(tree_bytes, pids)) for socket, pids in workers.items()}


def has_process(id: str) -> bool:
    """Whether the process of a worker runs."""
    return next(_with_argument(id), None) is not None


def _with_argument(id: str) -> Iterator[int]:
    """The pids of processes with the argument `id`, such as the worker of a model."""
    wanted = f"\0{id}\0".encode()
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if wanted in command_line.read_bytes():
                yield int(command_line.parent.name)


def processes_of(id: str) -> list[psutil.Process]:
    """The processes of a worker and their descendants."""
    processes = set()
    for pid in _with_argument(id):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            processes |= {process, *process.children(recursive=True)}
    return [*processes]


async def wait_for_exit(processes: Iterable[psutil.Process]) -> None:
    """Waits until killed processes have freed their memory."""
    end = asyncio.get_running_loop().time() + EXIT_S
    while left := [process for process in processes if _lives(process)]:
        if asyncio.get_running_loop().time() >= end:
            logger.error("of an unloaded model's processes %s are left", [p.pid for p in left])
            return
        await asyncio.sleep(EXIT_POLL_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
