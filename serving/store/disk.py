"""File helpers: locks between processes, whole writes, full disks, folder trees of any depth."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from common.model_files import is_hidden
from serving.errors import DiskFull, Unavailable

logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.05  # poll interval while another thread or process holds a lock
# Locks are held while models are removed, which takes seconds. Longer: a process that hangs delays
# others' loads. Shorter: a slow disk makes loads fail.
LOCK_LIMIT_S = 15.0


def lock(path: Path, *, shared: bool = False) -> int | None:
    """Lock the file `path`, creating it; return a descriptor whose closing unlocks the file.

    Works between threads and processes; the kernel unlocks the file when a process dies. Returns
    None if the file is locked already.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, kind)
            # The previous holder may have removed the file: then this lock protects nothing.
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


def wait_for_lock(path: Path, stop: threading.Event, *, shared: bool = False) -> int:
    """Wait for the lock of the file `path`, at most LOCK_LIMIT_S; return its descriptor.

    Raises `Unavailable` after that, and as soon as `stop` is set.
    """
    end = time.monotonic() + LOCK_LIMIT_S
    while (descriptor := lock(path, shared=shared)) is None:
        if stop.wait(LOCK_POLL_S) or time.monotonic() > end:
            raise Unavailable(
                f"the model cache is in use: another process holds the lock {path} for longer than"
                f" {LOCK_LIMIT_S:g} s"
            )
    return descriptor


@contextlib.contextmanager
def closing_descriptor(descriptor: int) -> Iterator[None]:
    """Close a descriptor at the exit."""
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def raise_disk_full(what: str) -> Iterator[None]:
    """Raise `DiskFull` in place of the system's errors for a full disk or quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"the disk is full; {what} does not fit") from error


def walk(folder: Path, *, hidden: bool = True, closed: bool = True) -> Iterator[os.DirEntry[str]]:
    """Yield all files and links below `folder`, or with `hidden=False` those that are not hidden.

    Skips files that vanish and folders that this user cannot read; with `closed=False` they raise
    `PermissionError`. Unlike `os.walk`, it does not recurse.
    """
    pending = [str(folder)]
    while pending:
        place = pending.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if not hidden and is_hidden(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        yield entry
            if not closed and not os.access(place, os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        except PermissionError:
            if not closed:
                raise
        except OSError:
            continue


def size_bytes(folder: Path, *, allocated: bool = False) -> int:
    """Return the size of all files below `folder`; 0 if the folder does not exist.

    `allocated`: without the holes of sparse files, such as running downloads.
    """
    size = 0
    for entry in walk(folder):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            size += min(status.st_size, status.st_blocks * 512) if allocated else status.st_size
    return size


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file by a rename: a reader gets all of the old content or all of the new.

    That holds for a crash of the process, not of the machine. Raises `OSError`.
    """
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def sync(folder: Path) -> None:
    """Wait until all files below `folder`, and its name, are on the disk. Raises `OSError`."""
    files = [Path(entry.path) for entry in walk(folder) if entry.is_file(follow_symlinks=False)]
    parents = {parent for file in files for parent in file.relative_to(folder).parents}
    for path in (*files, *(folder / parent for parent in parents), folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        with closing_descriptor(descriptor):
            os.fsync(descriptor)
