"""What has become of a process."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process | int) -> bool:
    """Though nobody may have waited for it yet."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def zombies_below(pid: int) -> list[psutil.Process]:
    """Processes under this one that have ended and that nobody has waited for."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:  # somebody just has
            continue
    return found
