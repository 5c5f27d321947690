"""Finds the processes of workers, measures their memory and waits for their exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

# Time limit for killed processes to free their memory; many gigabytes take seconds.
EXIT_S, EXIT_POLL_S = 10.0, 0.005


def private_bytes(sockets: Set[str]) -> dict[str, int]:
    """Return the private memory in bytes of each worker and its descendants, by socket.

    It is the resident memory that neither files nor shared memory back; pages shared after a fork
    count for each process. The machine's processes are read once for all workers.
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
    """Return whether a process of the worker with this id exists."""
    return next(_with_argument(id), None) is not None


def _with_argument(id: str) -> Iterator[int]:
    """Yield the pids of processes with `id` on their command line, as a model's worker has."""
    wanted = f"\0{id}\0".encode()
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if wanted in command_line.read_bytes():
                yield int(command_line.parent.name)


def processes_of(id: str) -> list[psutil.Process]:
    """Return the processes of the worker with this id, and all their descendants."""
    processes = set()
    for pid in _with_argument(id):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            processes |= {process, *process.children(recursive=True)}
    return [*processes]


async def wait_for_exit(processes: Iterable[psutil.Process]) -> None:
    """Wait until killed processes have exited, for at most EXIT_S; then log an error."""
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
