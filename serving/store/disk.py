"""Small things about files: locks between processes, a disk that is full, trees of any depth."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from serving.errors import DiskFull

logger = logging.getLogger(__name__)


def lock(path: Path, *, shared: bool = False, wait: bool = True) -> int | None:
    """Locks the file `path`, made if it is not there; closing what is returned unlocks it.

    Holds between threads and between processes; a process that dies lets go. None if another
    holds it and `wait` is false.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, kind)
            # Whoever held it may have removed the file meanwhile: then this locks nothing.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Waits for the lock and holds it; yields the file's descriptor."""
    descriptor = lock(path)
    assert descriptor is not None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def full_disk_is_an_error_of_ours(what: str) -> Iterator[None]:
    """Turns the system's error about a full disk into `DiskFull`; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"the disk is full; {what} does not fit") from error


def walk(folder: Path, *, hidden: bool = True) -> Iterator[os.DirEntry[str]]:
    """All below that is no folder, links to folders included; what is `hidden` where that is asked.

    What cannot be read, or vanishes meanwhile, is left out. Unlike `os.walk`, it does not recurse.
    """
    pending = [str(folder)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if not hidden and entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield entry


def size_bytes(folder: Path, *, allocated: bool = False) -> int:
    """Of all files in `folder`; 0 if it is not there. Files that vanish meanwhile do not count.

    `allocated`: without the holes of files that are still being downloaded.
    """
    size = 0
    for entry in walk(folder):
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            size += min(found.st_size, found.st_blocks * 512) if allocated else found.st_size
    return size
